// slots.glsl: the fields of SlotRow (subkv/batch.h). Include it after a buffer `slots` and the push constant
// p.slots_at.
const uint SLOT_WORDS = 3;

int slot_pos(uint slot) {
    return slots[p.slots_at + slot * SLOT_WORDS];
}

int slot_cell(uint slot) {
    return slots[p.slots_at + slot * SLOT_WORDS + 1];
}

int slot_token(uint slot) {
    return slots[p.slots_at + slot * SLOT_WORDS + 2];
}
