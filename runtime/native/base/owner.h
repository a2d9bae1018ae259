// owner.h: who can write to files that are trusted without a key. Windows has no owners in this sense, so there every
// file is trusted.
#pragma once

#include <string>

#if !defined(_WIN32)
#    include <sys/stat.h>
#    include <unistd.h>

#    include <cstdio>
#endif

namespace subkv {

// Files of this user, and of root, who can do anything anyway.
template <typename Status> bool is_trusted_owner([[maybe_unused]] const Status & status) {
#if defined(_WIN32)
    return true;
#else
    return status.st_uid == geteuid() || status.st_uid == 0;
#endif
}

enum class Writers { OWNER, GROUP }; // GROUP means the owner and his group, as with a umask of 002

// Returns who can write to the file or folder besides this user and root, with the remedy, or "" if nobody can. Follows
// links. The owner of `model`, which may be "", is trusted too.
inline std::string other_writers([[maybe_unused]] const std::string & path, [[maybe_unused]] Writers allowed,
                                 [[maybe_unused]] const std::string & model = "") {
#if !defined(_WIN32)
    struct stat status, of_model;
    if (::stat(path.c_str(), &status) != 0) {
        return "";
    }
    const bool is_models = !model.empty() && ::stat(model.c_str(), &of_model) == 0 && of_model.st_uid == status.st_uid;
    if (!is_trusted_owner(status) && !is_models) {
        return "owner " + std::to_string(status.st_uid) + " (chown it to user " + std::to_string(geteuid()) + ")";
    }
    if ((status.st_mode & (allowed == Writers::GROUP ? S_IWOTH : S_IWGRP | S_IWOTH)) != 0) {
        char mode[8];
        std::snprintf(mode, sizeof(mode), "%04o", (unsigned) (status.st_mode & 07777));
        return "mode " + std::string(mode) + " (chmod go-w)";
    }
#endif
    return "";
}

} // namespace subkv
