// error.h: the thread's last error sentence, see subkv_last_error().
#pragma once

namespace subkv {

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
void set_error(const char * fmt, ...);

void clear_error();

} // namespace subkv
