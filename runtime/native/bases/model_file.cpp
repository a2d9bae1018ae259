// model_file.cpp: see model_file.h.
#include "model_file.h"

#include "layout_keys.h"
#include "parallel.h"
#include "sha256.h"
#include "subkv.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <vector>

#if !defined(_WIN32)
#    include <fcntl.h>
#    include <unistd.h>
#endif

namespace subkv {

namespace {

constexpr uint64_t SAMPLE    = 4096; // bytes
constexpr size_t   N_HASHING = 2;    // threads, few because the model is loaded at the same time

// An unsigned 16-bit key of split files, or `otherwise` if it is absent or of another type.
uint16_t u16(const gguf_context * ctx, const char * key, uint16_t otherwise) {
    const int64_t i = gguf_find_key(ctx, key);
    return i >= 0 && gguf_get_kv_type(ctx, i) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(ctx, i) : otherwise;
}

// The keys that all copies of a model share, in order, as a GGUF without tensors.
std::vector<uint8_t> shared_metadata(const gguf_context * ctx) {
    const gguf_context_ptr copy(gguf_init_empty());
    gguf_set_kv(copy.get(), ctx);
    for (int64_t i = 0; i < gguf_get_n_kv(ctx); ++i) {
        const char * key = gguf_get_key(ctx, i);
        if (is_ours(key) || std::strncmp(key, "split.", 6) == 0) {
            gguf_remove_key(copy.get(), key);
        }
    }
    std::vector<uint8_t> bytes(gguf_get_meta_size(copy.get()));
    gguf_get_meta_data(copy.get(), bytes.data());
    return bytes;
}

// Returns whether `text` ends with `tail`. With `digits`, a 0 of `tail` matches any digit.
bool ends(const std::string & text, const std::string & tail, bool digits) {
    const auto same = [&](char of_tail, char c) {
        return digits && of_tail == '0' ? c >= '0' && c <= '9' : of_tail == c;
    };
    return text.size() >= tail.size() &&
           std::equal(tail.begin(), tail.end(), text.end() - (std::ptrdiff_t) tail.size(), same);
}

struct Tensor {
    std::string            name;
    int                    type;
    std::array<int64_t, 4> ne;

    size_t   file; // index of the file with the tensor
    uint64_t offset;
    uint64_t size;
};

// Hashed before a tensor's samples.
std::string head_of(const std::string & name, int type, const int64_t ne[4], uint64_t size) {
    std::string head = name;
    const auto  add  = [&](const std::string & field) { head.append(1, '\0').append(field); };
    add(std::to_string(type));
    add(std::to_string(ne[0]) + "," + std::to_string(ne[1]) + "," + std::to_string(ne[2]) + "," +
        std::to_string(ne[3]));
    add(std::to_string(size));
    add("");
    return head;
}

Tensor describe(const gguf_context * ctx, const ggml_tensor & t, int64_t i, size_t file) {
    const int64_t * ne = t.ne; // gguf_get_tensor_ne is new in ggml 0.20, and the plug-in runs with older ones
    return { gguf_get_tensor_name(ctx, i),
             (int) gguf_get_tensor_type(ctx, i),
             { ne[0], ne[1], ne[2], ne[3] },
             file,
             gguf_get_data_offset(ctx) + gguf_get_tensor_offset(ctx, i),
             gguf_get_tensor_size(ctx, i) };
}

void read_sample(std::ifstream & file, const std::string & path, uint64_t offset, uint64_t size, void * to) {
    errno = 0;
    if (!file.seekg((std::streamoff) offset) || !file.read((char *) to, (std::streamsize) size)) {
        const std::string at = " at byte " + std::to_string(offset);
        refuse(path, "a readable GGUF file",
               file.eof() ? "its end" + at : std::strerror(errno != 0 ? errno : EIO) + at);
    }
}

// A model's tensors, in all its files.
struct ModelTensors {
    std::vector<std::string>   files;
    std::vector<uint8_t>       metadata;
    std::vector<Tensor>        tensors; // by name
    std::vector<std::ifstream> opened;

    explicit ModelTensors(const std::string & path) {
        ggml_context_ptr shapes;
        gguf_context_ptr ctx = open_gguf(path.c_str(), &shapes);
        files                = model_files(path, ctx.get());
        metadata             = shared_metadata(ctx.get());
        for (size_t f = 0; f < files.size(); ++f) {
            if (f > 0) {
                ctx = open_gguf(files[f].c_str(), &shapes);
            }
            int64_t i = 0;
            for (auto * t = ggml_get_first_tensor(shapes.get()); t; t = ggml_get_next_tensor(shapes.get(), t)) {
                tensors.push_back(describe(ctx.get(), *t, i++, f));
            }
        }
        std::stable_sort(tensors.begin(), tensors.end(), [](auto & a, auto & b) { return a.name < b.name; });
        for (const auto & file : files) {
            opened.emplace_back(std::filesystem::u8path(file), std::ios::binary);
            if (!opened.back()) {
                refuse(file, "a readable GGUF file", std::strerror(errno));
            }
        }
    }

    void read(const Tensor & t, uint64_t start, uint64_t size, void * to) {
        read_sample(opened[t.file], files[t.file], t.offset + start, size, to);
    }
};

// An open file of a loaded model.
class LoadedFile {
public:
    // Throws Invalid, also if the file was replaced or changed.
    LoadedFile(const std::string & path, const FileStamp & stamp) : path(path), stamp(stamp) {
#if defined(_WIN32)
        file.reset(_wfopen(std::filesystem::u8path(path).c_str(), L"rb"));
#else
        const int opened = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        file.reset(opened < 0 ? nullptr : ::fdopen(opened, "rb"));
#endif
        if (!file) {
            throw Unavailable(path, "a readable file", std::strerror(errno));
        }
        check();
    }

    void check() const {
        FileStamp now;
        if (!stamp_of(number(), now) || !(now == stamp)) {
            refuse(path, "the file that was loaded", "one that was replaced or changed since then");
        }
    }

    // Any thread may call it.
    void read(uint64_t offset, void * to, size_t size) {
#if defined(_WIN32)
        const std::lock_guard<std::mutex> lock(mutex);
        const bool                        done =
            _fseeki64(file.get(), (int64_t) offset, SEEK_SET) == 0 && std::fread(to, 1, size, file.get()) == size;
#else
        bool done = true;
        for (size_t at = 0; at < size && done;) {
            const ssize_t n = ::pread(number(), (char *) to + at, size - at, (off_t) (offset + at));
            done            = n > 0 || (n < 0 && errno == EINTR);
            at += n > 0 ? (size_t) n : 0;
        }
#endif
        if (!done) {
            throw Unavailable(path, "a readable file", "no data at byte " + std::to_string(offset));
        }
    }

private:
    struct Close {
        void operator()(FILE * opened) const { std::fclose(opened); }
    };

    int number() const {
#if defined(_WIN32)
        return _fileno(file.get());
#else
        return ::fileno(file.get());
#endif
    }

    std::unique_ptr<FILE, Close> file;
    const std::string            path;
    const FileStamp              stamp;
#if defined(_WIN32)
    std::mutex mutex;
#endif
};

} // namespace

std::vector<std::string> model_files(const std::string & path, const gguf_context * first) {
    const uint16_t number = u16(first, "split.no", 0);
    const uint16_t count  = u16(first, "split.count", 1);
    if (count <= 1) {
        return { path };
    }
    const auto tail = [count](int i) { // as llama.cpp names them
        char text[32];
        std::snprintf(text, sizeof(text), "-%05d-of-%05d.gguf", i + 1, (int) count);
        return std::string(text);
    };
    if (path.size() == tail(number).size() || !ends(path, tail(number), false)) {
        refuse(path, "a name that ends in " + tail(number), "another name");
    }
    if (number != 0) {
        refuse(path, "the first file of a split model", "file " + std::to_string(number + 1));
    }
    const std::string        prefix = path.substr(0, path.size() - tail(number).size());
    std::vector<std::string> files;
    for (int i = 0; i < count; ++i) {
        files.push_back(prefix + tail(i));
    }
    return files;
}

std::string model_data(const LoadedModel & loaded) {
    const ModelTensors     model(loaded.path);
    std::deque<LoadedFile> files;
    if (model.files.size() != loaded.files.size()) {
        refuse(loaded.path, std::to_string(loaded.files.size()) + " files, as they were loaded",
               std::to_string(model.files.size()));
    }
    for (size_t f = 0; f < model.files.size(); ++f) {
        files.emplace_back(model.files[f], loaded.files[f]);
    }

    struct Leaf {
        const Tensor *          tensor;
        uint64_t                start, size;
        std::array<uint8_t, 32> digest;
    };

    std::vector<Leaf> leaves;
    for (const auto & t : model.tensors) {
        for (uint64_t start = 0; start < t.size; start += DATA_LEAF) {
            leaves.push_back({ &t, start, std::min(DATA_LEAF, t.size - start), {} });
        }
    }
    for_each_parallel(leaves.size(), N_HASHING, [&](size_t i) {
        constexpr uint64_t   PART = 256 << 10; // stays in the processor's cache until it is hashed
        Leaf &               leaf = leaves[i];
        std::vector<uint8_t> bytes((size_t) std::min(leaf.size, PART));
        Sha256               digest;
        for (uint64_t at = 0; at < leaf.size; at += PART) {
            const auto n = (size_t) std::min(PART, leaf.size - at);
            files[leaf.tensor->file].read(leaf.tensor->offset + leaf.start + at, bytes.data(), n);
            digest.update(bytes.data(), n);
        }
        leaf.digest = digest.digest();
    });
    Sha256 digest;
    auto   leaf = leaves.begin();
    digest.update(model.metadata.data(), model.metadata.size());
    for (const auto & t : model.tensors) {
        const std::string head = head_of(t.name, t.type, t.ne.data(), t.size);
        digest.update(head.data(), head.size());
        for (; leaf != leaves.end() && leaf->tensor == &t; ++leaf) {
            digest.update(leaf->digest.data(), leaf->digest.size());
        }
    }
    for (const auto & file : files) {
        file.check();
    }
    return digest.hex();
}

std::string model_content(const std::string & path) {
    ModelTensors model(path);
    Sha256       digest;
    digest.update(model.metadata.data(), model.metadata.size());
    for (const auto & t : model.tensors) {
        const std::string            head = head_of(t.name, t.type, t.ne.data(), t.size);
        std::array<char, 3 * SAMPLE> bytes;
        digest.update(head.data(), head.size());

        const auto sample = [&](uint64_t start, uint64_t size) {
            model.read(t, start, size, bytes.data());
            digest.update(bytes.data(), (size_t) size);
        };
        if (t.size <= 3 * SAMPLE) {
            sample(0, t.size);
            continue;
        }
        const uint64_t last = t.size - SAMPLE;
        for (const uint64_t start : { (uint64_t) 0, last / 2, last }) {
            sample(start, SAMPLE);
        }
    }
    return digest.hex();
}

std::vector<std::string> WeightsDigest::names(int first_layer, int last_layer) {
    std::vector<std::string> names;
    const auto               add = [&](int il, const char * name) {
        names.push_back("blk." + std::to_string(il) + "." + name + ".weight");
    };
    for (const char * name : { "attn_k", "attn_v", "attn_qkv", "attn_kv_a_mqa" }) {
        if (first_layer != last_layer) {
            add(first_layer, name);
        }
    }
    for (const char * name : { "attn_k", "attn_qkv", "attn_kv_a_mqa" }) { // keys do not depend on the layer's values
        add(last_layer, name);
    }
    return names;
}

void WeightsDigest::add(const std::string & name, int type, const int64_t ne[4], uint64_t size, const Reader & read) {
    constexpr uint64_t N_SAMPLES = 64;
    const std::string  head      = head_of(name, type, ne, size);
    any_                         = true;
    sha_.update(head.data(), head.size());
    std::vector<char> bytes((size_t) std::min(size, N_SAMPLES * SAMPLE));
    if (size <= N_SAMPLES * SAMPLE) {
        read(0, size, bytes.data());
    }
    for (uint64_t i = 0; size > N_SAMPLES * SAMPLE && i < N_SAMPLES; ++i) {
        read((size - SAMPLE) / (N_SAMPLES - 1) * i, SAMPLE, bytes.data() + i * SAMPLE);
    }
    sha_.update(bytes.data(), bytes.size());
}

std::string model_weights(const std::string & path, int first_layer, int last_layer) {
    ModelTensors  model(path);
    WeightsDigest digest;
    for (const auto & name : WeightsDigest::names(first_layer, last_layer)) {
        for (const auto & t : model.tensors) {
            if (t.name == name) {
                digest.add(name, t.type, t.ne.data(), t.size,
                           [&](uint64_t start, uint64_t size, void * to) { model.read(t, start, size, to); });
            }
        }
    }
    return digest.hex();
}

std::string model_stem(const std::string & model) {
    std::string stem = std::filesystem::u8path(model).filename().u8string();
    if (ends(stem, ".gguf", false)) {
        stem.resize(stem.size() - 5);
        if (ends(stem, "-00000-of-00000", true)) {
            stem.resize(stem.size() - 15);
        }
    }
    return stem;
}

bool ends_with(const std::string & text, const std::string & tail) {
    return ends(text, tail, false);
}

} // namespace subkv

extern "C" bool subkv_model_weights(const char * path, int32_t first_layer, int32_t last_layer, char out[65]) {
    return subkv::guarded("model", [&] {
        subkv::not_null(path, "subkv_model_weights: path");
        subkv::not_null(out, "subkv_model_weights: out");
        const std::string digest = subkv::model_weights(path, first_layer, last_layer);
        std::memcpy(out, digest.c_str(), digest.size() + 1);
    });
}

extern "C" bool subkv_model_content(const char * path, char out[65]) {
    return subkv::guarded("model", [&] {
        subkv::not_null(path, "subkv_model_content: path");
        subkv::not_null(out, "subkv_model_content: out");
        std::memcpy(out, subkv::model_content(path).c_str(), 65);
    });
}
