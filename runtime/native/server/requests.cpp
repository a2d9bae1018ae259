// requests.cpp: see llama-subkv-requests.h. Part of libsubkv-server.
#include "llama-subkv-requests.h"

#include "llama-subkv-programs.h"
#include "schema_limits.h"

// (of llama.cpp's tools/server)
#include "server-common.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace llama_subkv_server {
namespace {

constexpr int     TIMEOUT      = 60;      // seconds
constexpr size_t  MAX_BODY     = 1 << 25; // bytes; the tokens of a text need about a hundred times its size
constexpr size_t  MAX_PROMPTS  = 2048;    // each is a task ahead of other clients' requests
constexpr size_t  MAX_MESSAGES = 65536;   // a template needs about 0.1 ms and 5 KB for each
constexpr int64_t MAX_LAST_N   = 1 << 22; // a sampler allocates memory for this many tokens at once

constexpr const char * JSON = "application/json; charset=utf-8";

std::string error(const std::string & why, error_type type) {
    return safe_json_to_str(json{ { "error", format_error_response(why, type) } });
}

void answer(httplib::Response & response, int status, const std::string & why, error_type type) {
    response.status = status;
    response.headers.erase("Content-Length");
    response.set_content(error(why, type), JSON);
}

// Whether a value is several prompts, rather than one that consists of tokens and texts.
bool several(const json & value) {
    return value.is_array() && value.size() > MAX_PROMPTS &&
           std::none_of(value.begin(), value.end(),
                        [](const json & part) { return part.is_number() || part.is_object(); });
}

bool lower(json & data, const char * name, int64_t most) {
    if (!data.contains(name) || !data.at(name).is_number_integer() || data.at(name).get<int64_t>() <= most) {
        return false;
    }
    data[name] = most;
    return true;
}

// Returns whether numbers were lowered to their limits. Throws std::invalid_argument with another limit.
bool check(json & data) {
    for (const char * name : { "prompt", "input", "content" }) {
        if (data.contains(name) && several(data.at(name))) {
            throw std::invalid_argument("too many prompts in one request: at most " + std::to_string(MAX_PROMPTS));
        }
    }
    if (data.contains("messages") && data.at("messages").size() > MAX_MESSAGES) {
        throw std::invalid_argument("too many messages in one request: at most " + std::to_string(MAX_MESSAGES));
    }
    // The chat routes derive these from templates. A client's regular expression can take exponential time, and its
    // parser can end the process.
    for (const char * name : { "grammar_triggers", "chat_parser" }) {
        if (data.contains(name) && !data.at(name).empty()) {
            throw std::invalid_argument(std::string(name) + " is set by the server");
        }
    }
    check_schemas(data);
    const auto n_vocab = (int64_t) llama_subkv_usage_get().n_vocab; // a sampler in the graph takes no more tokens
    bool       lowered = n_vocab > 0 && lower(data, "top_k", n_vocab);
    for (const char * name : { "repeat_last_n", "dry_penalty_last_n" }) {
        lowered = lower(data, name, MAX_LAST_N) || lowered;
    }
    if (data.contains("instances") && data.at("instances").is_array()) { // requests in a request (AIP_PREDICT_ROUTE)
        for (auto & instance : data.at("instances")) {
            lowered = (instance.is_object() && !instance.contains("instances") && check(instance)) || lowered;
        }
    }
    return lowered;
}

bool is_stream(const httplib::Response & response) {
    return response.get_header_value("Content-Type").rfind("text/event-stream", 0) == 0;
}

// A provider that ends the stream with an error at a shutdown, because what the handler has sent until then is no complete
// answer.
httplib::ContentProvider until_shutdown(httplib::ContentProvider provider) {
    return [provider = std::move(provider)](size_t offset, size_t length, httplib::DataSink & sink) {
        bool              done = false, more = true;
        httplib::DataSink inner;
        inner.write       = sink.write;
        inner.is_writable = sink.is_writable;
        inner.done        = [&] { done = true; };
        if (!llama_subkv_ends()) {
            more = provider(offset, length, inner);
        }
        if (llama_subkv_ends()) {
            const auto event = "data: " + error("the server is shutting down", ERROR_TYPE_UNAVAILABLE) + "\n\n";
            sink.write(event.data(), event.size());
            done = true;
        }
        if (done) {
            sink.done();
        }
        return more && !done;
    };
}

} // namespace

void limit(httplib::Server & server, const common_params & params) {
    server.set_read_timeout(std::min(params.timeout_read, TIMEOUT));
    server.set_write_timeout(std::min(params.timeout_write, TIMEOUT));
    server.set_payload_max_length(MAX_BODY);
    server.set_pre_request_handler([](const httplib::Request & request, httplib::Response &) {
        // handlers ask this function while they wait for a result
        auto & closed = const_cast<httplib::Request &>(request).is_connection_closed;
        closed        = [closed = std::move(closed)] { return llama_subkv_ends() || closed(); };
        return httplib::Server::HandlerResponse::Unhandled;
    });
    server.set_post_routing_handler([](const httplib::Request &, httplib::Response & response) {
        if (response.content_provider_ && is_stream(response)) {
            response.content_provider_ = until_shutdown(std::move(response.content_provider_));
        } else if (llama_subkv_ends() && response.body.empty() && !response.content_provider_) {
            answer(response, 503, "the server is shutting down", ERROR_TYPE_UNAVAILABLE);
            response.set_header("Content-Length", std::to_string(response.body.size()));
        }
    });
}

bool refuses(const httplib::Request & request, httplib::Response & response) {
    const auto why = llama_subkv_refusal(request.get_header_value("Host"), request.get_header_value("Origin"));
    if (!why.empty()) {
        answer(response, 403, why, ERROR_TYPE_PERMISSION);
    }
    return !why.empty();
}

bool refuses(std::string & body, httplib::Response & response) {
    json data;
    try {
        data = json::parse(body);
    } catch (const std::exception &) { // the handler parses it again, and reports the error
        return false;
    }
    try {
        if (data.is_object() && check(data)) {
            body = data.dump_safe();
        }
        return false;
    } catch (const std::invalid_argument & e) {
        answer(response, 400, e.what(), ERROR_TYPE_INVALID_REQUEST);
        return true;
    }
}

} // namespace llama_subkv_server
