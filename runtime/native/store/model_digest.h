// model_digest.h: which model the states of a context belong to.
#pragma once

#include "error.h"
#include "file_stamp.h"

#include <string>

namespace subkv {

// A digest that is not yet computed.
struct NotYet : Unavailable {
    NotYet() : Unavailable("model", "its digest", "that its file is still being read") {}
};

// model_data of a loaded model. A thread that the first call starts computes it once, and it is stored beside the bases for
// the next process, until one of the files changes. Waits up to `seconds`, and all calls of a process together wait this
// long at most. Throws NotYet, or Invalid if the files are others now or cannot be read.
std::string model_digest(const LoadedModel & model, double seconds);

} // namespace subkv
