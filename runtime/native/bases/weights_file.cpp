// weights_file.cpp: see weights_file.h.
#include "weights_file.h"

#include "error.h"
#include "layout_keys.h"
#include "model_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace subkv {

namespace {

constexpr const char * WHY          = "bases from the weights need it";
constexpr size_t       MAX_BLOCK    = 256u << 10; // bytes read at once
constexpr size_t       MAX_ELEMENTS = 1u << 20;   // of a list that is read, and of a vector
constexpr int64_t      MOST_ROWS    = 1 << 30;    // of a matrix in memory, and elements of a row

// A number in a file's metadata.
void read_number(gguf_type type, const void * data, size_t i, MetaValue & out) {
    const auto set = [&](auto of_type) {
        std::memcpy(&of_type, (const char *) data + i * sizeof(of_type), sizeof(of_type));
        out.integer = (int64_t) of_type;
        out.real    = (double) of_type;
    };
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_BOOL: set(uint8_t()); break;
        case GGUF_TYPE_INT8: set(int8_t()); break;
        case GGUF_TYPE_UINT16: set(uint16_t()); break;
        case GGUF_TYPE_INT16: set(int16_t()); break;
        case GGUF_TYPE_UINT32: set(uint32_t()); break;
        case GGUF_TYPE_INT32: set(int32_t()); break;
        case GGUF_TYPE_UINT64: set(uint64_t()); break;
        case GGUF_TYPE_INT64: set(int64_t()); break;
        case GGUF_TYPE_FLOAT32: {
            float value;
            std::memcpy(&value, (const char *) data + i * sizeof(value), sizeof(value));
            out.real = (double) value;
            break;
        }
        case GGUF_TYPE_FLOAT64: std::memcpy(&out.real, (const char *) data + i * sizeof(double), sizeof(double)); break;
        default: break;
    }
}

bool is_real(gguf_type type) {
    return type == GGUF_TYPE_FLOAT32 || type == GGUF_TYPE_FLOAT64;
}

} // namespace

bool MetaValue::truthy() const {
    switch (kind) {
        case Kind::INTEGER: return integer != 0;
        case Kind::REAL: return real != 0.0;
        case Kind::TEXT: return !text.empty();
        case Kind::LIST: return !integers || !list.empty();
        default: return false;
    }
}

WeightsFile::WeightsFile(const std::string & path) {
    ggml_context_ptr shapes;
    metadata_ = open_gguf(path.c_str(), &shapes);
    files_    = model_files(path, metadata_.get());
    arch_     = get("general.architecture").text;
    for (size_t f = 0; f < files_.size(); ++f) {
        gguf_context_ptr     other = f > 0 ? open_gguf(files_[f].c_str(), &shapes) : nullptr;
        const gguf_context * ctx   = other ? other.get() : metadata_.get();
        int64_t              i     = 0;
        for (auto * t = ggml_get_first_tensor(shapes.get()); t; t = ggml_get_next_tensor(shapes.get(), t), ++i) {
            const uint64_t offset = gguf_get_data_offset(ctx) + gguf_get_tensor_offset(ctx, i);
            tensors_.emplace(gguf_get_tensor_name(ctx, i), Tensor{ f,
                                                                   offset,
                                                                   (int) t->type,
                                                                   { t->ne[0], t->ne[1], t->ne[2], t->ne[3] },
                                                                   gguf_get_tensor_size(ctx, i) });
        }
    }
}

WeightsFile::WeightsFile(const gguf_context * metadata, const subkv_matrix * matrices, int32_t n) :
    files_{ "the model" }, metadata_(gguf_init_empty()) {
    gguf_set_kv(metadata_.get(), metadata);
    arch_ = get("general.architecture").text;
    for (const subkv_matrix * m = matrices; m < matrices + n; ++m) {
        const std::string name = m->name ? m->name : "";
        if (!m->data || m->type < 0 || m->type >= GGML_TYPE_COUNT || m->n_rows < 1 || m->n_rows > MOST_ROWS ||
            m->n < 1 || m->n > MOST_ROWS || m->n % ggml_blck_size((ggml_type) m->type) != 0) {
            refuse(name, "a matrix in memory", std::to_string(m->n_rows) + " rows of " + std::to_string(m->n));
        }
        if (m->order &&
            (m->n_order < 1 || m->n_rows % m->n_order != 0 ||
             std::any_of(m->order, m->order + m->n_order, [&](int i) { return i < 0 || i >= m->n_order; }))) {
            refuse(name, "an order of rows within " + std::to_string(m->n_rows), "another one");
        }
        const uint64_t size = (uint64_t) m->n_rows * ggml_row_size((ggml_type) m->type, m->n);
        tensors_.emplace(name, Tensor{ 0, 0, m->type, { m->n, m->n_rows, 1, 1 }, size, m });
    }
}

MetaValue WeightsFile::get(const std::string & key) const {
    const gguf_context * ctx = metadata_.get();
    const int64_t        i   = gguf_find_key(ctx, key.c_str());
    MetaValue            out;
    if (i < 0) {
        return out;
    }
    const gguf_type type = gguf_get_kv_type(ctx, i);
    if (type == GGUF_TYPE_STRING) {
        out.kind = MetaValue::Kind::TEXT;
        out.text = gguf_get_val_str(ctx, i);
        return out;
    }
    if (type != GGUF_TYPE_ARRAY) {
        out.kind = is_real(type) ? MetaValue::Kind::REAL : MetaValue::Kind::INTEGER;
        read_number(type, gguf_get_val_data(ctx, i), 0, out);
        return out;
    }
    const gguf_type of = gguf_get_arr_type(ctx, i);
    const size_t    n  = gguf_get_arr_n(ctx, i);
    if (of == GGUF_TYPE_STRING || of == GGUF_TYPE_ARRAY || n > MAX_ELEMENTS) {
        return out;
    }
    out.kind     = MetaValue::Kind::LIST;
    out.integers = !is_real(of);
    for (size_t j = 0; out.integers && j < n; ++j) {
        MetaValue element;
        read_number(of, gguf_get_arr_data(ctx, i), j, element);
        out.list.push_back(element.integer);
    }
    return out;
}

WeightMatrix WeightsFile::matrix(const std::string & name) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) {
        refuse(name, "this tensor in " + files_[0], std::string("none; ") + WHY);
    }
    const Tensor & t = it->second;
    if (t.ne[2] != 1 || t.ne[3] != 1) {
        refuse(name, "a matrix",
               std::to_string(t.ne[2]) + " x " + std::to_string(t.ne[3]) + " matrices; " + std::string(WHY));
    }
    const auto type = (ggml_type) t.type;
    if (type != GGML_TYPE_F32 && !ggml_get_type_traits(type)->to_float) {
        refuse(name, "a tensor type that can be dequantized", std::string("type ") + ggml_type_name(type) + "; " + WHY);
    }
    const size_t row_bytes = ggml_row_size(type, t.ne[0]);
    if ((uint64_t) t.ne[1] * row_bytes != t.size) { // so that offsets of rows stay inside
        refuse(name, std::to_string(t.ne[1]) + " rows of " + std::to_string(row_bytes) + " bytes",
               std::to_string(t.size) + " bytes");
    }
    return { name, t.file, t.offset, t.type, t.ne[1], t.ne[0], row_bytes, t.memory };
}

std::optional<std::vector<double>> WeightsFile::vector(const std::string & name) const {
    if (!has_tensor(name)) {
        return std::nullopt;
    }
    const WeightMatrix of = matrix(name);
    if ((uint64_t) of.n_rows * (uint64_t) of.n > MAX_ELEMENTS) {
        refuse(name, "at most " + std::to_string(MAX_ELEMENTS) + " elements",
               std::to_string(of.n_rows) + " rows of " + std::to_string(of.n));
    }
    std::vector<double> values;
    RowReader(*this).rows(of, 0, of.n_rows, 1,
                          [&](const float * row) { values.insert(values.end(), row, row + of.n); });
    return values;
}

int64_t RowReader::rows_at_once(const WeightMatrix & matrix) {
    return std::max<int64_t>(1, (int64_t) (MAX_BLOCK / std::max<size_t>(1, matrix.row_bytes)));
}

void RowReader::read(const WeightMatrix & matrix, int64_t row, int64_t n) {
    raw_.resize((size_t) n * matrix.row_bytes);
    row_.resize((size_t) matrix.n);
    if (const subkv_matrix * m = matrix.memory) {
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at   = row + i;
            const int64_t from = m->order ? at / m->n_order * m->n_order + m->order[at % m->n_order] : at;
            std::memcpy(raw_.data() + (size_t) i * matrix.row_bytes,
                        (const char *) m->data + (size_t) from * matrix.row_bytes, matrix.row_bytes);
        }
        return;
    }
    const std::string & path = weights_.files_[matrix.file];
    auto                file = files_.find(matrix.file);
    errno                    = 0;
    if (file == files_.end()) {
        file = files_.emplace(matrix.file, std::ifstream(std::filesystem::u8path(path), std::ios::binary)).first;
    }
    const uint64_t at = matrix.offset + (uint64_t) row * matrix.row_bytes;
    if (!file->second.seekg((std::streamoff) at) || !file->second.read(raw_.data(), (std::streamsize) raw_.size())) {
        const std::string where = " at byte " + std::to_string(at);
        const std::string why   = file->second.eof() ? "its end" : std::strerror(errno != 0 ? errno : EIO);
        throw Unavailable(path, "a readable GGUF file", why + where);
    }
}

float * RowReader::values(const WeightMatrix & matrix, int64_t row) {
    const char * raw = raw_.data() + (size_t) row * matrix.row_bytes;
    if ((ggml_type) matrix.type == GGML_TYPE_F32) {
        std::memcpy(row_.data(), raw, matrix.row_bytes);
    } else {
        ggml_get_type_traits((ggml_type) matrix.type)->to_float(raw, row_.data(), matrix.n);
    }
    return row_.data();
}

} // namespace subkv
