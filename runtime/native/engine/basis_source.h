// basis_source.h: the bases that code a context's cells. The engine asks these classes for everything that depends on
// how bases change over a text. They are themselves the static bases of the file, which never change; another source
// derives from them (runtime/native/adapt, left out of a build with -DSUBKV_ADAPT=OFF).
#pragma once

#include "cache_desc.h"
#include "cell_reader.h"
#include "graph_build.h"
#include "layout.h"
#include "state_io.h"
#include "subkv.h"
#include "subkv/ops.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace subkv {

struct LayerNodes;
class Window;

// The bases of one layer.
class LayerBases {
public:
    virtual ~LayerBases() = default;

    // If this returns true, encode does not code this side's rows, and the node of build_encode codes them later.
    virtual bool codes_later(bool value) const;
    // Bytes that a cell's row has after the codes of all heads.
    virtual size_t extra_bytes(bool value) const;
    // The node after which attend runs. `fresh` is the node of encode. Layers on a GPU have static bases.
    virtual ggml_tensor * build_encode(LayerNodes & layer, const AttnBuild & b, ggml_tensor * fresh) const;
    // Ops::attend(args) for one head and cells of one stream. k_tiles and v_tiles are tiles of all heads that begin
    // with the first cell of args.
    virtual void attend(const AttendArgs & args, uint32_t stream, int64_t head, const uint8_t * k_tiles,
                        const uint8_t * v_tiles) const;

    // The first position without a code, if this side codes later.
    virtual int32_t coded(uint32_t stream, int64_t head, bool value) const;
    // Decodes cells [n] to x [n][d] as read_rows does, from the tiles of all heads. version [n] tells which of the
    // bases over time has coded the cell, where 0 means the file's.
    virtual void read(const LayerNodes & layer, uint32_t stream, int64_t head, bool value, const uint8_t * tiles,
                      int64_t stride, int64_t n, const int64_t * cells, float * x, int32_t * version) const;
};

// The bases of one context.
class BasisSource {
public:
    virtual ~BasisSource() = default;

    virtual const LayerBases & layer(int32_t il) const;
    // Returns true if a token gets its code after it has left the exact window. Then not every tail can be removed,
    // positions do not move, and the window has halves, from which the codes are computed.
    virtual bool codes_later() const;

    // Of the methods that check, those that return bool set the error and return false.
    virtual void    clear(uint32_t stream);
    virtual int32_t coded(uint32_t stream) const; // the bases depend on positions below it
    virtual void    copy(uint32_t src, uint32_t dst);
    virtual bool    can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const;
    virtual bool    can_shift() const;
    virtual bool    ready(const std::vector<TokenDesc> & tokens, bool causal, const Window & window,
                          const CellReader & cells) const;

    // Differs between sources that cannot read each other's states, or 0 for static bases.
    virtual uint64_t    identity() const;
    virtual std::string describe() const;      // for error messages
    virtual void        check_partial() const; // throws Invalid if states cannot be partial
    // Everything that the source remembers of a stream, whose first n_pos positions have cells. After a state_read that
    // throws std::runtime_error, the stream is empty.
    virtual void state_write(StateWriter & w, uint32_t stream) const;
    virtual void state_read(StateReader & r, uint32_t stream, int32_t n_pos);

    virtual size_t bytes() const;                  // of memory for changing bases
    virtual void   stats(subkv_stats & out) const; // adds the fields about them
};

// Creates the bases of a context. Throws Invalid if its model, window or streams do not allow them.
using MakeBases = std::function<std::unique_ptr<BasisSource>(const Layout &, const Window &, const CacheDesc &)>;

// The bases that the options `adapt` request, as --adapt. For errors, `key` names who has selected them. Throws
// Invalid.
MakeBases bases_of(const std::string & adapt, const char * key);

} // namespace subkv
