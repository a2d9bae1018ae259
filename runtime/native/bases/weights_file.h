// weights_file.h: a model's metadata and matrices, read from its files without loading it, or from memory.
#pragma once

#include "ggml-cpp.h"
#include "subkv.h"

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace subkv {

// The value of a metadata key.
struct MetaValue {
    enum class Kind : uint8_t { NONE, INTEGER, REAL, TEXT, LIST };

    Kind                 kind    = Kind::NONE;
    int64_t              integer = 0;   // also of a boolean
    double               real    = 0.0; // of both kinds of numbers
    std::string          text;
    std::vector<int64_t> list;             // of integers or booleans
    bool                 integers = false; // false if it is a list of other values, which `list` lacks

    bool is_integer() const { return kind == Kind::INTEGER; }

    bool is_list() const { return kind == Kind::LIST; }

    bool truthy() const; // a number that is not 0, or a list or text that is not empty
};

// A matrix of weights, or a stack of them, whose rows follow each other.
struct WeightMatrix {
    std::string name;
    size_t      file   = 0; // index in the model's files
    uint64_t    offset = 0;
    int         type   = 0;
    int64_t     n_rows = 0, n = 0; // n is the number of elements of a row
    size_t      row_bytes = 0;

    const subkv_matrix * memory = nullptr; // its rows, which are else in the file
};

// All files of a model. Methods are thread-safe, and throw Invalid about a key or a tensor.
class WeightsFile {
public:
    // `path` is the first file of a split model. Throws Invalid.
    explicit WeightsFile(const std::string & path);
    // A model in memory, whose matrices must outlive this object. Throws Invalid.
    WeightsFile(const gguf_context * metadata, const subkv_matrix * matrices, int32_t n);

    const std::string & arch() const { return arch_; }

    MetaValue get(const std::string & key) const;
    // The same for a key of the model's architecture, such as `attention.head_count`.
    MetaValue of_arch(const std::string & key) const { return get(arch_ + "." + key); }

    bool has_tensor(const std::string & name) const { return tensors_.count(name) != 0; }

    WeightMatrix matrix(const std::string & name) const;
    // All elements of a tensor, in double, or nothing if it is missing.
    std::optional<std::vector<double>> vector(const std::string & name) const;

private:
    friend class RowReader;

    struct Tensor {
        size_t   file;
        uint64_t offset;
        int      type;
        int64_t  ne[4];
        uint64_t size;

        const subkv_matrix * memory = nullptr;
    };

    std::vector<std::string>      files_;
    gguf_context_ptr              metadata_; // of the first file
    std::string                   arch_;
    std::map<std::string, Tensor> tensors_;
};

// Reads rows of a model's matrices as float. One object per thread.
class RowReader {
public:
    explicit RowReader(const WeightsFile & weights) : weights_(weights) {}

    // Calls use(row) for rows first, first + step, ... below first + count, in order. A `row` has matrix.n values,
    // which the callee may change. Throws Invalid.
    template <typename F>
    void rows(const WeightMatrix & matrix, int64_t first, int64_t count, int64_t step, F use) {
        const int64_t block = step > 1 ? 1 : rows_at_once(matrix);
        for (int64_t i = first; i < first + count; i += block * step) {
            const int64_t n = std::min(block, first + count - i);
            read(matrix, i, n);
            for (int64_t j = 0; j < n; ++j) {
                use(values(matrix, j));
            }
        }
    }

private:
    static int64_t rows_at_once(const WeightMatrix & matrix);
    void           read(const WeightMatrix & matrix, int64_t row, int64_t n);
    float *        values(const WeightMatrix & matrix, int64_t row); // of those read

    const WeightsFile &             weights_;
    std::map<size_t, std::ifstream> files_;
    std::vector<char>               raw_;
    std::vector<float>              row_;
};

} // namespace subkv
