// layout_json.cpp: the JSON of subkv.layout (read, FORMAT.md §2) and of subkv_layout_json (written, subkv.h).
//
// The reader accepts only the grammar of §2 (objects with known members, arrays, unsigned integers). Its code bounds
// depth, member names and value types, so a hostile text cannot make it recurse or allocate.
//
// Reasons against nlohmann::json of the pinned tree: a SAX handler with the same checks had 256 lines instead of 266,
// because the grammar becomes a table of states. Its events have no position in the text, which 28 of our 60 messages
// about damaged layouts report. It copies names and numbers of any length, accepts escaped member names and a byte
// order mark, which the format excludes, and quotes bytes that are not UTF-8. Its writer prints floats with the digits
// of a double, not with FORMAT.md's 9.
#include "cache_request.h"
#include "error.h"
#include "layout.h"
#include "numbers.h"
#include "quantizer.h"
#include "sha256.h"
#include "subkv/trellis.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <sstream>

namespace subkv {

int HeadSpec::rank() const {
    int r = 0;
    for (int i = 0; i < n_bands; ++i) {
        r += bands[i].n;
    }
    return r;
}

size_t LayerSpec::basis_bytes() const {
    size_t bytes = 0;
    for (int h = 0; h < n_head_kv; ++h) {
        const size_t rank_k = (size_t) k[h].rank();
        bytes += 4 * (size_t) (1 + k[h].n_bands) + 2 * (size_t) d_k + 2 * 2 * rank_k * (size_t) d_k;
        if (!latent()) {
            bytes += 4 * (size_t) v[h].n_bands + 2 * 2 * (size_t) v[h].rank() * (size_t) d_v;
        }
    }
    return bytes;
}

//
// reader
//

namespace {

class LayoutReader {
public:
    LayoutReader(std::string_view text, int block_count, const std::string & key) :
        text(text), block_count(block_count), key(key) {}

    std::vector<LayerSpec> read() {
        std::vector<LayerSpec> layers;
        where = "top level";
        if (text.size() > MAX_LAYOUT_BYTES) {
            refuse(key, "at most " + std::to_string(MAX_LAYOUT_BYTES) + " bytes", std::to_string(text.size()));
        }
        object({ "layers" }, [&](size_t) { array([&] { layer(layers); }); });
        skip_space();
        if (at != text.size()) {
            unexpected("the end");
        }
        if (layers.empty()) {
            fail("expected at least one layer, found none");
        }
        return layers;
    }

private:
    void layer(std::vector<LayerSpec> & layers) {
        const std::string name = "layers[" + std::to_string(layers.size()) + "]";
        LayerSpec         spec;
        where = name;
        object({ "il", "n_head_kv", "d_k", "d_v", "k", "v" }, [&](size_t i) {
            switch (i) {
                case 0: spec.il = integer("il", 0, block_count - 1); break;
                case 1: spec.n_head_kv = integer("n_head_kv", 1, MAX_HEADS_KV); break;
                case 2: spec.d_k = size("d_k"); break;
                case 3: spec.d_v = size("d_v"); break;
                case 4: heads(name + ".k", spec.k); break;
                case 5: heads(name + ".v", spec.v); break;
            }
        });
        // Checks that involve several members come after the object's end, because the order of members is free.
        check_heads("k", spec.k, spec.n_head_kv, spec.d_k);
        const bool latent = spec.v.empty() && spec.n_head_kv == 1 && spec.d_v <= spec.d_k;
        if (!latent) {
            check_heads("v", spec.v, spec.n_head_kv, spec.d_v);
        }
        if (!layers.empty() && spec.il <= layers.back().il) {
            fail("expected il above " + std::to_string(layers.back().il) + ", found " + std::to_string(spec.il));
        }
        layers.push_back(std::move(spec));
    }

    void check_heads(const std::string & name, const std::vector<HeadSpec> & heads, int n_head_kv, int d) const {
        if ((int) heads.size() != n_head_kv) {
            fail("expected bands of " + std::to_string(n_head_kv) + " heads in " + name + ", found " +
                 std::to_string(heads.size()));
        }
        for (size_t h = 0; h < heads.size(); ++h) {
            if (heads[h].rank() > d) {
                fail("expected at most " + std::to_string(d) + " coefficients in " + name + "[" + std::to_string(h) +
                     "], found " + std::to_string(heads[h].rank()));
            }
        }
    }

    void heads(const std::string & name, std::vector<HeadSpec> & out) {
        array([&] {
            where = name + "[" + std::to_string(out.size()) + "]";
            if (out.size() >= MAX_HEADS_KV) {
                fail("expected at most " + std::to_string(MAX_HEADS_KV) + " heads, found more");
            }
            HeadSpec head;
            array([&] { band(head); });
            if (head.n_bands == 0) {
                fail("expected 1.." + std::to_string(MAX_BANDS) + " bands, found none");
            }
            out.push_back(head);
        });
    }

    void band(HeadSpec & head) {
        if (head.n_bands >= MAX_BANDS) {
            fail("expected at most " + std::to_string(MAX_BANDS) + " bands, found more");
        }
        expect('[');
        const int n = size("n");
        expect(',');
        const int bits = integer("bits", 2, 16);
        expect(']');
        if (!is_width(bits)) {
            fail("expected bits of a band to be one of 16, 8, 6, 5, 4, 3, 2, found " + std::to_string(bits));
        }
        head.bands[head.n_bands++] = { (uint16_t) n, (uint16_t) bits };
    }

    // { name: value, ... } with every name exactly once, in any order. member(i) reads the value of the i-th name.
    template <typename F> void object(std::initializer_list<std::string_view> names, F member) {
        const std::string here = where;
        unsigned          seen = 0;
        expect('{');
        do {
            const std::string_view name = string();
            const auto             i    = (size_t) (std::find(names.begin(), names.end(), name) - names.begin());
            if (i == names.size()) {
                fail("expected members " + join(names, ~0u) + ", found " + quoted(name));
            }
            if (seen >> i & 1) {
                fail("expected member " + quoted(name) + " once, found it twice");
            }
            seen |= 1u << i;
            expect(':');
            member(i);
            where = here;
        } while (accept(','));
        expect('}');
        if (const unsigned missing = ~seen & ((1u << names.size()) - 1); missing != 0) {
            fail("expected member " + join(names, missing) + ", found none");
        }
    }

    template <typename F> void array(F element) {
        expect('[');
        if (accept(']')) {
            return;
        }
        do {
            element();
        } while (accept(','));
        expect(']');
    }

    // Member names of §2 need no escapes, so the reader rejects escapes.
    std::string_view string() {
        expect('"');
        const size_t begin = at;
        while (at < text.size() && text[at] >= ' ' && text[at] < 0x7f && text[at] != '"' && text[at] != '\\') {
            ++at;
        }
        if (at == text.size() || text[at] != '"') {
            unexpected("a member name");
        }
        return text.substr(begin, at++ - begin);
    }

    int integer(const std::string & name, int lo, int hi) {
        skip_space();
        const size_t begin = at;
        while (at < text.size() && text[at] >= '0' && text[at] <= '9') {
            ++at;
        }
        const std::string_view digits = text.substr(begin, at - begin);
        const std::string expected    = "an integer " + std::to_string(lo) + ".." + std::to_string(hi) + " for " + name;
        if (digits.empty() || (digits.size() > 1 && digits[0] == '0')) {
            at = begin;
            unexpected(expected);
        }
        if (at < text.size() && (text[at] == '.' || text[at] == 'e' || text[at] == 'E')) {
            unexpected(expected);
        }
        int value = 0;
        for (char c : digits.substr(0, 7)) {
            value = value * 10 + (c - '0');
        }
        if (digits.size() > 7 || value < lo || value > hi) {
            fail("expected " + expected + ", found " + shortened(digits));
        }
        return value;
    }

    int size(const std::string & name) {
        const int value = integer(name, 8, MAX_HEAD_SIZE);
        if (value % 8 != 0) {
            fail("expected a multiple of 8 for " + name + ", found " + std::to_string(value));
        }
        return value;
    }

    void skip_space() {
        while (at < text.size() && (text[at] == ' ' || text[at] == '\t' || text[at] == '\n' || text[at] == '\r')) {
            ++at;
        }
    }

    bool accept(char c) {
        skip_space();
        const bool there = at < text.size() && text[at] == c;
        at += there;
        return there;
    }

    void expect(char c) {
        if (!accept(c)) {
            unexpected(std::string("'") + c + "'");
        }
    }

    [[noreturn]] void unexpected(const std::string & expected) const {
        std::string found = "the end of the text";
        if (at < text.size()) {
            const char c = text[at];
            found        = c > ' ' && c < 0x7f ? std::string("'") + c + "'" : "byte " + std::to_string((uint8_t) c);
        }
        fail("expected " + expected + " at byte " + std::to_string(at) + ", found " + found);
    }

    [[noreturn]] void fail(const std::string & what) const { throw Invalid(key + ": " + where + ": " + what); }

    static std::string shortened(std::string_view s) {
        return s.size() > 40 ? std::string(s.substr(0, 40)) + "…" : std::string(s);
    }

    static std::string quoted(std::string_view s) { return "'" + shortened(s) + "'"; }

    static std::string join(std::initializer_list<std::string_view> names, unsigned which) {
        std::string out;
        for (size_t i = 0; i < names.size(); ++i) {
            if (which >> i & 1) {
                out += (out.empty() ? "" : ", ") + quoted(names.begin()[i]);
            }
        }
        return out;
    }

    std::string_view    text;
    int                 block_count;
    const std::string & key;
    size_t              at = 0;
    std::string         where;
};

} // namespace

std::vector<LayerSpec> parse_layout(std::string_view text, int block_count, const std::string & key) {
    return LayoutReader(text, block_count, key).read();
}

//
// writer
//

static std::ostringstream json_stream() {
    std::ostringstream out = plain_stream();
    out.precision(9); // exact round trip of a float
    return out;
}

// [item, item, ...] of n items, each written by item(i).
template <typename F> static void write_list(std::ostream & out, size_t n, F item) {
    out << '[';
    for (size_t i = 0; i < n; ++i) {
        out << (i ? "," : "");
        item(i);
    }
    out << ']';
}

static void write_heads(std::ostream & out, const std::vector<HeadSpec> & heads) {
    write_list(out, heads.size(), [&](size_t h) {
        write_list(out, (size_t) heads[h].n_bands,
                   [&](size_t b) { out << '[' << heads[h].bands[b].n << ',' << heads[h].bands[b].bits << ']'; });
    });
}

std::string canonical_layout(const std::vector<LayerSpec> & layers) {
    std::ostringstream out = json_stream();
    out << "{\"layers\":";
    write_list(out, layers.size(), [&](size_t i) {
        const LayerSpec & l = layers[i];
        out << "{\"il\":" << l.il << ",\"n_head_kv\":" << l.n_head_kv << ",\"d_k\":" << l.d_k << ",\"d_v\":" << l.d_v
            << ",\"k\":";
        write_heads(out, l.k);
        out << ",\"v\":";
        write_heads(out, l.v);
        out << '}';
    });
    out << '}';
    return out.str();
}

// load_layout has checked that strings are UTF-8.
static std::string json_string(const std::string & s) {
    std::string out = "\"";
    for (char c : s) {
        const uint8_t byte = (uint8_t) c;
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (byte < 0x20 || byte == 0x7f) {
            out += "\\u00" + hex_digits(&byte, 1);
        } else {
            out += c;
        }
    }
    return out + '"';
}

static void write_head(std::ostream & out, const HeadCodec & head, size_t offset, const float * gamma) {
    out << '{';
    if (gamma) {
        out << "\"gamma\":" << *gamma << ",\"centred\":" << (head.offset ? "true" : "false") << ',';
    }
    out << "\"rank\":" << head.rank << ",\"row_bytes\":" << head.row_bytes << ",\"offset\":" << offset << ",\"bands\":";
    write_list(out, (size_t) head.n_bands, [&](size_t b) {
        const Band & band = head.bands[b];
        out << "{\"n\":" << band.n << ",\"bits\":" << band.bits << ",\"first\":" << band.first
            << ",\"offset\":" << band.offset << ",\"ratio\":" << band.ratio << '}';
    });
    out << '}';
}

std::string layout_to_json(const Layout & l) {
    std::ostringstream out = json_stream();
    out << "{\"version\":" << l.version << ",\"codec\":" << json_string(l.codec) << ",\"arch\":" << json_string(l.arch)
        << ",\"block_count\":" << l.n_layer << ",\"n_sink\":" << l.n_sink << ",\"n_recent\":" << l.n_recent
        << ",\"recent_bits\":" << l.recent_bits << ",\"bits_per_element\":" << l.bpe
        << ",\"bits_per_element_rows\":" << l.bpe_rows << ",\"bpe_context\":" << l.bpe_context
        << ",\"budget\":" << l.budget << ",\"gamma\":" << json_string(l.gamma)
        << ",\"basis_k\":" << json_string(l.basis_k) << ",\"basis_v\":" << json_string(l.basis_v)
        << ",\"base_sha256\":" << json_string(l.base_sha256)
        << ",\"calibration\":{\"sha256\":" << json_string(l.calibration_sha256)
        << ",\"tokens\":" << l.calibration_tokens << ",\"text\":" << json_string(l.calibration_text)
        << "},\"generator\":" << json_string(l.generator) << ",\"adapt\":" << json_string(l.adapt) << ",\"plans\":";
    write_list(out, l.plans.size(), [&](size_t i) {
        const PlanFacts & plan = l.plans[i];
        out << "{\"budget\":" << plan.budget << ",\"bits_per_element\":" << plan.bpe
            << ",\"predicted\":" << plan.predicted << '}';
    });
    out << ",\"fingerprint\":" << json_string(l.fingerprint) << ",\"bytes_per_token\":" << l.bytes_per_token
        << ",\"bytes_bases\":" << l.bytes_bases << ",\"layers\":";
    write_list(out, l.layers.size(), [&](size_t i) {
        const LayerCodec & layer = l.layers[i];
        out << "{\"il\":" << layer.il << ",\"n_head_kv\":" << layer.n_head_kv << ",\"d_k\":" << layer.d_k
            << ",\"d_v\":" << layer.d_v << ",\"k_row_bytes\":" << layer.k_row_bytes
            << ",\"v_row_bytes\":" << layer.v_row_bytes << ",\"k\":";
        write_list(out, layer.k.size(),
                   [&](size_t h) { write_head(out, layer.k[h], layer.k_offset[h], &layer.gamma[h]); });
        out << ",\"v\":";
        const size_t n_v = layer.latent ? 0 : layer.v.size();
        write_list(out, n_v, [&](size_t h) { write_head(out, layer.v[h], layer.v_offset[h], nullptr); });
        out << '}';
    });
    out << '}';
    return out.str();
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

std::string constants_to_json() {
    constexpr int      EXACT_DOUBLE = 17; // digits
    std::ostringstream out          = json_stream();
    out << "{\"version\":" << FORMAT_VERSION << ",\"scale_one\":" << SCALE_ONE
        << ",\"scale_candidates_below\":" << SCALE_CANDIDATES_BELOW << ",\"half_max\":" << (int) HALF_MAX
        << ",\"max_bands\":" << MAX_BANDS << ",\"max_head_size\":" << MAX_HEAD_SIZE << ",\"band_step\":" << BAND_STEP
        << ",\"max_layers\":" << MAX_LAYERS << ",\"max_heads_kv\":" << MAX_HEADS_KV << ",\"max_sink\":" << MAX_SINK
        << ",\"max_recent\":" << MAX_RECENT << ",\"n_sink\":" << DEFAULT_SINK << ",\"n_recent\":" << DEFAULT_RECENT
        << ",\"n_rollback\":" << DEFAULT_ROLLBACK << ",\"cache_types\":{";
    for (const ggml_type type : ORDINARY_TYPES) {
        out << (type == ORDINARY_TYPES[0] ? "" : ",") << '"' << ggml_type_name(type) << "\":[" << (int) type << ','
            << element_bits(type) << ']';
    }
    out << "},\"quantizers\":{";
    for (const int32_t bits : WIDTHS) {
        out << (bits == WIDTHS[0] ? "" : ",") << '"' << bits << "\":[" << number(quantizer_step(bits), EXACT_DOUBLE)
            << ',' << number(quantizer_distortion(bits), EXACT_DOUBLE) << ']';
    }
    out << "},\"planes\":{";
    for (const int32_t bits : WIDTHS) {
        const int32_t low = low_plane(bits);
        out << (bits == WIDTHS[0] ? "" : ",") << '"' << bits << "\":[" << low;
        if (low < bits) {
            out << ',' << bits - low;
        }
        out << ']';
    }
    out << "},\"trellis\":{\"least\":" << TRELLIS_LEAST << ",\"least_latent\":" << TRELLIS_LEAST_LATENT
        << ",\"below\":" << TRELLIS_BELOW << ",\"tried\":" << TRELLIS_TRIED << ",\"bends\":{";
    for (int32_t bits = WIDTHS[0]; bits <= TRELLIS_BITS; ++bits) {
        out << (bits == WIDTHS[0] ? "" : ",") << '"' << bits << "\":[" << trellis_double(bits) << ','
            << trellis_triple(bits) << ']';
    }
    out << "},\"shares\":{";
    for (int32_t bits = WIDTHS[0]; bits <= TRELLIS_BITS; ++bits) {
        out << (bits == WIDTHS[0] ? "" : ",") << '"' << bits << "\":" << bits_of(trellis_share(bits));
    }
    out << "}},\"scales\":";
    write_list(out, std::size(SCALES), [&](size_t u) { out << bits_of(SCALES[u]); });
    out << '}';
    return out.str();
}

} // namespace subkv
