// prompt_bias.glsl: the mask of a prompt's rows, for prompt_mask.comp and prompt_lost.comp. A token attends either to
// the coded row or to the exact row of every visible key. Include it after mask.glsl, slots.glsl and tokens.glsl.
float prompt_bias(uint token, uint row) {
    const uint stream = token / p.n_tps;
    const int  own    = token_pos(token);
    int        cell   = -1;
    if (row < p.n_kv) {
        cell = is_exact(cell_pos[p.cell_pos_at + stream * p.n_kv + row], own) ? -1 : int(row);
    } else if (row < p.n_kv + p.n_slots) {
        const uint first = token_first_slot(token); // first slot of its sequence
        const uint slot  = (p.n_stream > 1 ? token_first_slot(stream * p.n_tps) : 0) + row - p.n_kv;
        if (slot - first < p.slots_of_seq) {
            const int pos = slot_pos(slot);
            cell          = pos >= 0 && is_exact(pos, own) ? slot_cell(slot) : -1;
        }
    } else if (row < p.n_kv + p.n_slots + p.n_tps && p.slots_of_seq > 0) {
        const uint other = stream * p.n_tps + row - p.n_kv - p.n_slots;
        const int  pos   = token_pos(other);
        cell             = pos >= 0 && is_exact(pos, own) ? token_cell(other) : -1;
    }
    return cell < 0 ? HIDDEN : mask_value(p.mask_at + token * p.n_kv + uint(cell), p.mask_half);
}
