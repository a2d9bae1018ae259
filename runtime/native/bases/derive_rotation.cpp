// derive_rotation.cpp: see derive_rotation.h.
#include "derive_rotation.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <sstream>

namespace subkv {

namespace {

// Architectures by the place of rotary pairs in llama.cpp, which are neighbours, or half of the rotated dimensions
// apart.
constexpr const char * NEIGHBOURS  = "llama";
constexpr const char * SECTIONS    = "qwen2vl";
constexpr const char * INTERLEAVED = "qwen3vl qwen3vlmoe qwen35 qwen35moe";
constexpr const char * HALVES =
    "qwen2 qwen3 gemma stablelm phi2 gptneox starcoder2 lfm2 lfm2moe qwen3next gemma2 gemma3 qwen3moe";
constexpr const char * UNROTATED = "gpt2 bloom jais mpt refact";

// Further architectures for which only the partners hold, because some of their layers may rotate at other frequencies
// or not at all.
constexpr const char * ALSO_NEIGHBOURS =
    "arcee arctic baichuan bailingmoe chameleon chatglm cohere2 cohere2moe command-r deci deepseek "
    "ernie4_5 ernie4_5-moe granite granitemoe internlm2 llada llama4 maincoder minicpm mistral3 nanbeige "
    "olmo plm smollm3 starcoder xverse";
constexpr const char * ALSO_HALVES =
    "afmoe apertus bailingmoe2 bitnet codeshell dbrx dots1 dream exaone exaone-moe exaone4 falcon "
    "gemma3n gemma4 gpt-oss grok grovemoe hunyuan-dense hunyuan-moe jais2 llada-moe mellum mimo2 "
    "minicpm3 minimax-m2 minimax-m3 nemotron olmo2 olmoe openelm orion pangu-embedded phi3 phimoe plamo "
    "plamo3 qwen qwen2moe rnd1 qwen4exp seed_oss smallthinker";

bool is_one_of(const std::string & arch, std::initializer_list<const char *> lists) {
    return std::any_of(lists.begin(), lists.end(), [&](const char * names) {
        std::istringstream words(names);
        return std::find(std::istream_iterator<std::string>(words), std::istream_iterator<std::string>(), arch) !=
               std::istream_iterator<std::string>();
    });
}

// The pairs that depend on a token's fourth position, which is 0 in text.
bool fourth(const std::vector<int64_t> & sections, int pair, bool interleaved) {
    const int64_t total = sections[0] + sections[1] + sections[2] + sections[3];
    const int64_t i     = pair % std::max<int64_t>(total, 1);
    if (!interleaved) {
        return i >= total - sections[3];
    }
    return i >= 3 * sections[(size_t) (i % 3)];
}

// Means of cos(omega o) and sin(omega o) over o in [0, span].
void mean_cos_sin(double omega, double span, double & cos, double & sin) {
    constexpr double PI     = 3.14159265358979323846;
    const double     middle = omega * span / 2;
    const double     x      = middle == 0.0 ? PI * 1e-20 : PI * (middle / PI);
    const double     scale  = std::sin(x) / x;
    cos                     = std::cos(middle) * scale;
    sin                     = std::sin(middle) * scale;
}

} // namespace

bool is_unrotated(const std::string & arch) {
    return is_one_of(arch, { UNROTATED });
}

std::optional<std::vector<int>> rotary_partners(const WeightsFile & weights, int d) {
    std::vector<int> partner;
    for (int i = 0; i < d; ++i) {
        partner.push_back(i);
    }
    const std::string & arch = weights.arch();
    if (is_unrotated(arch)) {
        return partner;
    }
    MetaValue n_rot = weights.of_arch("rope.dimension_count");
    if (n_rot.is_integer() && n_rot.integer > d) { // heads with sliding windows may be smaller
        n_rot = weights.of_arch("rope.dimension_count_swa");
    } else if (!n_rot.truthy()) {
        n_rot.kind    = MetaValue::Kind::INTEGER;
        n_rot.integer = d;
    }
    const bool neighbours = is_one_of(arch, { NEIGHBOURS, ALSO_NEIGHBOURS });
    const bool known      = neighbours || is_one_of(arch, { HALVES, SECTIONS, INTERLEAVED, ALSO_HALVES });
    if (!known || !n_rot.is_integer() || n_rot.integer < 0 || n_rot.integer > d || n_rot.integer % 2 != 0) {
        return std::nullopt;
    }
    const int n = (int) n_rot.integer;
    for (int i = 0; i < n; ++i) {
        partner[(size_t) i] = neighbours ? i ^ 1 : (i + n / 2) % n;
    }
    return partner;
}

std::vector<double> RotaryPairs::averaged(const std::vector<double> & means, double span) const {
    std::vector<double> out(means.size());
    for (size_t i = 0; i < means.size(); ++i) {
        double cos, sin;
        mean_cos_sin(omega[i], span, cos, sin);
        out[i] = means[i] * cos + means[(size_t) partner[i]] * sin;
    }
    return out;
}

std::optional<RotaryPairs> rotary_pairs(const WeightsFile & weights, int d) {
    const std::string & arch        = weights.arch();
    const bool          neighbours  = is_one_of(arch, { NEIGHBOURS });
    const bool          interleaved = is_one_of(arch, { INTERLEAVED });
    const MetaValue     scaling     = weights.of_arch("rope.scaling.type");
    const bool          linear      = scaling.text == "linear";
    const bool          scaled      = scaling.kind != MetaValue::Kind::NONE && scaling.text != "none" && !linear;
    if (scaled || !(neighbours || is_one_of(arch, { HALVES, SECTIONS, INTERLEAVED }))) {
        return std::nullopt;
    }
    const MetaValue count = weights.of_arch("rope.dimension_count");
    const int64_t   n_rot = count.truthy() ? count.integer : d;
    if (n_rot < 0 || n_rot > d || n_rot % 2 != 0 || count.is_list()) {
        return std::nullopt;
    }
    const int           half   = (int) n_rot / 2;
    const MetaValue     base   = weights.of_arch("rope.freq_base");
    const MetaValue     factor = weights.of_arch("rope.scaling.factor");
    std::vector<double> theta;
    for (int i = 0; i < half; ++i) {
        theta.push_back(std::pow(base.truthy() ? base.real : 10000.0, -2.0 * i / (double) n_rot));
        theta.back() /= linear && factor.truthy() ? factor.real : 1.0;
    }
    if (const auto factors = weights.vector("rope_freqs.weight")) {
        if (factors->size() < theta.size()) {
            return std::nullopt;
        }
        for (size_t i = 0; i < theta.size(); ++i) {
            theta[i] /= (*factors)[i];
        }
    }
    const MetaValue sections  = weights.of_arch("rope.dimension_sections");
    const auto      plausible = [&](int64_t n) { return n >= 0 && n <= d; };
    if (is_one_of(arch, { SECTIONS, INTERLEAVED }) && sections.list.size() == 4 &&
        std::all_of(sections.list.begin(), sections.list.end(), plausible)) {
        for (int i = 0; i < half; ++i) {
            theta[(size_t) i] = fourth(sections.list, i, interleaved) ? 0.0 : theta[(size_t) i];
        }
    }
    RotaryPairs pairs;
    for (int i = 0; i < d; ++i) {
        pairs.partner.push_back(i);
        pairs.omega.push_back(0.0);
    }
    for (int i = 0; i < half; ++i) {
        const auto first      = (size_t) (neighbours ? 2 * i : i);
        const auto second     = first + (size_t) (neighbours ? 1 : half);
        pairs.partner[first]  = (int) second;
        pairs.partner[second] = (int) first;
        pairs.omega[first]    = -theta[(size_t) i];
        pairs.omega[second]   = theta[(size_t) i];
    }
    return pairs;
}

} // namespace subkv
