// llama-subkv-body.h: reads the body of a state, including rows of coded cells. Part of libllama.
#pragma once

#include "checksum.h"
#include "llama-subkv-state.h"

#include "llama-impl.h"
#include "llama-io.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

class llama_memory_recurrent;

namespace llama_subkv {

// The tensors of coded layers, one per stream, which store cells in tiles.
class tiles {
public:
    struct side {
        int32_t il;
        bool    value;
    };

    explicit tiles(const llama_kv_cache & kv) : kv(kv) {
        for (const auto & layer : access::layers(kv)) {
            if (row_bytes(kv, layer.il, false) == 0) {
                continue;
            }
            for (const bool value : { false, true }) {
                for (const ggml_tensor * t : value ? layer.v_stream : layer.k_stream) {
                    if (t) { // values of a latent layer have none
                        sides[t] = { (int32_t) layer.il, value };
                    }
                }
            }
        }
    }

    // Copies `size` bytes of rows from or to an offset of a tensor, which may also be an ordinary one.
    void get(const ggml_tensor * t, size_t offset, size_t size, uint8_t * rows) const {
        if (const auto * side = of(t)) {
            access::hook(kv)->get_rows(side->il, side->value, t, (int64_t) (offset / t->nb[1]),
                                       (int64_t) (size / t->nb[1]), rows);
        } else {
            ggml_backend_tensor_get(t, rows, offset, size);
        }
    }

    void set(ggml_tensor * t, size_t offset, size_t size, const uint8_t * rows) const {
        if (const auto * side = of(t)) {
            access::hook(kv)->set_rows(side->il, side->value, t, (int64_t) (offset / t->nb[1]),
                                       (int64_t) (size / t->nb[1]), rows);
        } else {
            ggml_backend_tensor_set(t, rows, offset, size);
        }
    }

    // The rows of cells of one stream's tensor, in their order.
    std::vector<uint8_t> get(const ggml_tensor * t, const std::vector<uint32_t> & cells) const {
        const size_t         row = t->nb[1];
        std::vector<uint8_t> rows(cells.size() * row);
        each_run(cells,
                 [&](uint32_t cell, size_t at, size_t n) { get(t, cell * row, n * row, rows.data() + at * row); });
        return rows;
    }

    void set(ggml_tensor * t, const std::vector<uint32_t> & cells, const std::vector<uint8_t> & rows) const {
        const size_t row = t->nb[1];
        each_run(cells,
                 [&](uint32_t cell, size_t at, size_t n) { set(t, cell * row, n * row, rows.data() + at * row); });
    }

private:
    // Calls use(first cell, index of it, number) for runs of adjacent cells.
    template <typename F> static void each_run(const std::vector<uint32_t> & cells, F use) {
        for (size_t i = 0, end = 0; i < cells.size(); i = end) {
            for (end = i + 1; end < cells.size() && cells[end] == cells[end - 1] + 1; ++end) {
            }
            use(cells[i], i, end - i);
        }
    }

    // Returns nullptr for another tensor
    const side * of(const ggml_tensor * t) const {
        const auto it = sides.find(t);
        return it == sides.end() ? nullptr : &it->second;
    }

    const llama_kv_cache &                        kv;
    std::unordered_map<const ggml_tensor *, side> sides;
};

// A read position in the complete bytes of a state.
class cursor {
public:
    explicit cursor(const std::vector<uint8_t> & bytes) : bytes(bytes) {}

    const uint8_t * take(size_t n) {
        if (n > bytes.size() - at) {
            throw std::runtime_error("state: " + std::to_string(n) + " more bytes expected, " +
                                     std::to_string(bytes.size() - at) + " found");
        }
        at += n;
        return bytes.data() + at - n;
    }

    template <typename T> T value() {
        T x;
        std::memcpy(&x, take(sizeof(x)), sizeof(x));
        return x;
    }

    size_t used() const { return at; }
    size_t left() const { return bytes.size() - at; }

private:
    const std::vector<uint8_t> & bytes;
    size_t                       at = 0;
};

// Reads the body of a state from `io`, checks it, and then replaces `io` as the source.
class row_reader : public llama_io_read_i, public subkv::StateReader {
public:
    // `sum` is the checksum of what was read before, as in row_writer.
    row_reader(llama_kv_cache & kv, llama_io_read_i & io, uint64_t sum = subkv::CHECKSUM_OF_NOTHING) :
        kv(kv), coded(kv), at(bytes) {
        constexpr uint64_t PIECE = 1 << 24; // a damaged size must not allocate more memory than the file has bytes
        uint64_t           left, expected;
        io.read(&left, sizeof(left));
        while (left > 0) {
            const auto n = (size_t) std::min(left, PIECE);
            bytes.resize(bytes.size() + n);
            io.read(bytes.data() + bytes.size() - n, n);
            left -= n;
        }
        io.read(&expected, sizeof(expected));
        const uint64_t found = subkv::checksum(sum, bytes.data(), bytes.size());
        if (found != expected) {
            throw std::runtime_error(
                format("state: checksum %016" PRIx64 " expected, %016" PRIx64 " found", expected, found));
        }
    }

    // Checks the body for the cache that receives its cells: kv, or another part of the memory.
    void check(const llama_kv_cache & of, llama_seq_id seq) const;
    void check(const llama_memory_recurrent & of, llama_seq_id seq) const;
    void check(const llama_memory_i & of, llama_seq_id seq) const;

    // This is not memcpy, because `data` may be null if size is 0.
    void read(void * data, size_t size) override { std::copy_n(at.take(size), size, (uint8_t *) data); }

    void read_tensor(ggml_tensor * t, size_t offset, size_t size) override {
        const uint8_t * rows = at.take(size);
        try {
            coded.set(t, offset, size, rows);
        } catch (...) { // llama.cpp would zero a range of bytes, which holds parts of other cells of the tiles
            failure = std::current_exception();
        }
    }

    size_t n_bytes() override { return at.used(); }

    const uint8_t *         take(size_t n) { return at.take(n); }
    template <typename T> T value() { return at.value<T>(); }

    // Throws if bytes are left, or if rows could not be set.
    void end() const {
        if (failure) {
            std::rethrow_exception(failure);
        }
        if (at.left() > 0) {
            throw std::runtime_error("state: its end expected, " + std::to_string(at.left()) + " bytes found");
        }
    }

private:
    llama_kv_cache &     kv;
    const tiles          coded;
    std::vector<uint8_t> bytes;
    cursor               at;
    std::exception_ptr   failure;
};

} // namespace llama_subkv
