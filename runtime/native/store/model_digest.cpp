// model_digest.cpp: see model_digest.h.
#include "model_digest.h"

#include "model_file.h"
#include "store_folder.h"
#include "subkv.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#if defined(_WIN32)
#    include <process.h>
#else
#    include <unistd.h>
#endif

namespace subkv {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char * ENDING   = ".model-digest"; // as in runtime/doctor/cache_folder.py
constexpr const char * TITLE    = "subkv model digest 1\n";
constexpr size_t       N_DIGITS = 64;
constexpr int64_t      RECENT   = 2000000000; // ns: a file may change again within the resolution of its time

// What is stored: the files, their digest, and the checksum of both.
std::string sealed(const std::string & stamps, const std::string & digest) {
    const std::string text = TITLE + stamps + digest + "\n";
    Sha256            sum;
    sum.update(text.data(), text.size());
    return text + sum.hex() + "\n";
}

// Digests of earlier processes, in the folder of bases. Without a folder that is this user's alone, nothing is stored.
class StoredDigests {
public:
    explicit StoredDigests(const std::string & stamps) : stamps(stamps) {
        Sha256 digest;
        digest.update(stamps.data(), stamps.size());
        name = digest.hex().substr(0, 32) + ENDING;
        try {
            if (const char * path = subkv_sidecar_folder()) {
                folder.emplace(path, Writers::GROUP);
            }
        } catch (const std::exception &) {
        }
    }

    std::string read() const {
        const size_t size = sealed(stamps, std::string(N_DIGITS, '0')).size();
        std::string  text(size, '\0');
        try {
            if (folder && folder->read(name, size, { { (uint8_t *) text.data(), size } })) {
                const std::string digest = text.substr(std::string(TITLE).size() + stamps.size(), N_DIGITS);
                return text == sealed(stamps, digest) ? digest : "";
            }
        } catch (const std::exception &) { // it is computed again
        }
        return "";
    }

    void write(const std::string & digest) const {
        const std::string text = sealed(stamps, digest);
        try {
            if (folder) {
                folder->write(name, { { (const uint8_t *) text.data(), text.size() } });
            }
        } catch (const std::exception &) {
        }
    }

private:
    const std::string          stamps;
    std::string                name;
    std::optional<StoreFolder> folder;
};

std::string stamps_of(const LoadedModel & model) {
    std::string text;
    for (const auto & file : model.files) {
        text += file.text() + "\n";
    }
    return text;
}

std::string compute(const LoadedModel & model) {
    if (model.path.empty() || model.files.empty()) {
        refuse("model", "a model from a file", "one from memory or a stream");
    }
    const StoredDigests stored(stamps_of(model));
    std::string         digest = stored.read();
    if (digest.empty()) {
        digest            = model_data(model);
        const int64_t now = StoreFolder::now();
        bool          old = true;
        for (const auto & file : model.files) {
            old = old && now - std::max(file.modified, file.changed) > RECENT && file.inode != 0;
        }
        if (old) {
            stored.write(digest);
        }
    }
    return digest;
}

int this_process() {
#if defined(_WIN32)
    return _getpid();
#else
    return (int) getpid();
#endif
}

struct Job {
    std::mutex              mutex;
    std::condition_variable ready;
    std::atomic<bool>       is_done{ false };
    const int               process = this_process(); // whose thread computes it: a fork has no threads
    std::string             digest;
    std::exception_ptr      error;
    double                  waited = 0; // seconds, of all calls
};

std::shared_ptr<Job> job_of(const LoadedModel & model) {
    // Never destroyed: a thread may still read a model when the process ends.
    static auto * mutex = new std::mutex;
    static auto * jobs  = new std::map<std::string, std::shared_ptr<Job>>;

    const std::lock_guard<std::mutex> lock(*mutex);
    std::shared_ptr<Job> &            job = (*jobs)[model.path + "\n" + stamps_of(model)];
    if (!job || (!job->is_done && job->process != this_process())) {
        const auto made = std::make_shared<Job>();
        std::thread([made, model] {
            std::string        digest;
            std::exception_ptr error;
            try {
                digest = compute(model);
            } catch (...) {
                error = std::current_exception();
            }
            const std::lock_guard<std::mutex> lock_job(made->mutex);
            made->digest  = std::move(digest);
            made->error   = error;
            made->is_done = true;
            made->ready.notify_all();
        }).detach();
        job = made;
    }
    return job;
}

} // namespace

std::string model_digest(const LoadedModel & model, double seconds) {
    const auto                   job   = job_of(model);
    const auto                   start = Clock::now();
    std::unique_lock<std::mutex> lock(job->mutex);
    const auto                   left = std::chrono::duration<double>(std::max(0.0, seconds - job->waited));
    job->ready.wait_for(lock, left, [&] { return job->is_done.load(); });
    job->waited += std::chrono::duration<double>(Clock::now() - start).count();
    if (!job->is_done) {
        throw NotYet();
    }
    if (job->error) {
        std::rethrow_exception(job->error);
    }
    return job->digest;
}

} // namespace subkv
