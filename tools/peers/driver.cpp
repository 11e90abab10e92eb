// Runs a GGUF file with llama.cpp, greedily, and prints one JSON object: what `metaltail bench peers` asks of a peer.
// Built by build.sh against llama.h. Times are of llama_decode with the choice of the next id, loading apart.

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

namespace {

struct Options {
    std::string model;
    std::string ids;
    std::string logits;
    int tokens = 1;
    int threads = 1;
    int context = 0;
    int batch = 512;
    bool mmap = true;
    bool repack = true;
    bool exact_kv = false;
    bool verbose = false;
    std::vector<llama_model_kv_override> overrides; // ends with an empty key
};

const char * const USAGE =
    "usage: llama-peer --model FILE.gguf --ids FILE [--tokens N] [--threads N] [--mmap on|off] [--repack on|off]\n"
    "                  [--kv f16|f32] [--context N] [--batch N] [--logits FILE] [--override KEY=N] [--verbose]\n"
    "--ids      JSON with an array of prompt ids, such as {\"ids\": [1, 2, 3]}\n"
    "--tokens   ids to generate; the first follows from the prompt, so one less is decoded\n"
    "--batch    prompt rows computed at once\n"
    "--repack   whether llama.cpp may rearrange weights for the processor (its default); rearranged weights are\n"
    "           a copy in anonymous memory\n"
    "--kv       numbers of keys and values (llama.cpp's default is f16); f32 also turns fused attention off\n"
    "--override a whole number of the metadata in place of the file's\n"
    "--logits   little-endian f32 rows of all prompt positions, one after another\n";

int number(const std::string & flag, const std::string & text, int least, int most) {
    size_t end = 0;
    long value = 0;
    try {
        value = std::stol(text, &end);
    } catch (const std::exception &) {
        end = 0;
    }
    if (end == 0 || end != text.size() || value < least || value > most) {
        throw std::runtime_error(flag + ": wanted a number from " + std::to_string(least) + " to " +
                                 std::to_string(most) + ", got '" + text + "'");
    }
    return (int) value;
}

bool either(const std::string & flag, const std::string & text, const char * yes, const char * no) {
    if (text == yes) {
        return true;
    }
    if (text == no) {
        return false;
    }
    throw std::runtime_error(flag + ": wanted " + yes + " or " + no + ", got '" + text + "'");
}

llama_model_kv_override overridden(const std::string & flag, const std::string & text) {
    const size_t equals = text.find('=');
    llama_model_kv_override item = {};
    if (equals == std::string::npos || equals == 0 || equals >= sizeof(item.key)) {
        throw std::runtime_error(flag + ": wanted KEY=N, got '" + text + "'");
    }
    item.tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    text.copy(item.key, equals);
    item.val_i64 = number(flag, text.substr(equals + 1), 0, std::numeric_limits<int32_t>::max());
    return item;
}

Options parse(int argc, char ** argv) {
    Options o;
    for (int i = 1; i < argc; i++) {
        const std::string flag = argv[i];
        if (flag == "--verbose") {
            o.verbose = true;
            continue;
        }
        if (i + 1 == argc) {
            throw std::runtime_error(flag + ": unknown, or without a value");
        }
        const std::string value = argv[++i];
        if (flag == "--model") {
            o.model = value;
        } else if (flag == "--ids") {
            o.ids = value;
        } else if (flag == "--logits") {
            o.logits = value;
        } else if (flag == "--tokens") {
            o.tokens = number(flag, value, 1, 1 << 20);
        } else if (flag == "--threads") {
            o.threads = number(flag, value, 1, 1024);
        } else if (flag == "--context") {
            o.context = number(flag, value, 1, 1 << 28);
        } else if (flag == "--batch") {
            o.batch = number(flag, value, 1, 1 << 16);
        } else if (flag == "--mmap") {
            o.mmap = either(flag, value, "on", "off");
        } else if (flag == "--repack") {
            o.repack = either(flag, value, "on", "off");
        } else if (flag == "--override") {
            o.overrides.push_back(overridden(flag, value));
        } else if (flag == "--kv") {
            o.exact_kv = either(flag, value, "f32", "f16");
        } else {
            throw std::runtime_error(flag + ": unknown");
        }
    }
    if (o.model.empty() || o.ids.empty()) {
        throw std::runtime_error("--model and --ids are needed");
    }
    o.overrides.push_back({});
    return o;
}

// The first array of whole numbers in a JSON file; nothing else of it matters here.
std::vector<llama_token> read_ids(const std::string & path) {
    std::ifstream file(path);
    std::stringstream all;
    all << file.rdbuf();
    if (!file) {
        throw std::runtime_error(path + ": cannot be read");
    }
    const std::string text = all.str();
    size_t at = text.find('[');
    const size_t end = text.find(']');
    if (at == std::string::npos || end == std::string::npos || end < at) {
        throw std::runtime_error(path + ": has no array of ids");
    }
    std::vector<llama_token> ids;
    std::string item;
    for (at++; at <= end; at++) {
        if (text[at] == ',' || text[at] == ']') {
            ids.push_back(number(path, item, 0, std::numeric_limits<int32_t>::max()));
            item.clear();
        } else if (!std::isspace((unsigned char) text[at])) {
            item += text[at];
        }
    }
    return ids;
}

double seconds() {
    using clock = std::chrono::steady_clock;
    return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

// The lowest id among the largest logits, as metaltail chooses.
llama_token greedy(const float * row, int vocab) {
    return (llama_token) (std::max_element(row, row + vocab) - row);
}

struct Timed {
    std::vector<llama_token> ids;
    double prefill = 0;
    std::vector<double> decode;
};

const float * row_of(llama_context * context, int at) {
    const float * row = llama_get_logits_ith(context, at);
    if (row == nullptr) {
        throw std::runtime_error("llama.cpp gave no logits");
    }
    return row;
}

// Computes the prompt in batches. Logits of every row are only asked for where they are written out: they cost time.
llama_token prefill(llama_context * context, const std::vector<llama_token> & prompt, int vocab, int rows,
                    std::ofstream * logits) {
    llama_batch batch = llama_batch_init(rows, 0, 1);
    llama_token next = 0;
    for (size_t first = 0; first < prompt.size(); first += rows) {
        batch.n_tokens = (int) std::min(prompt.size() - first, (size_t) rows);
        for (int i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = prompt[first + i];
            batch.pos[i] = (llama_pos) (first + i);
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = logits != nullptr || first + i + 1 == prompt.size();
        }
        if (llama_decode(context, batch) != 0) {
            throw std::runtime_error("llama_decode failed in the prompt");
        }
        for (int i = 0; logits != nullptr && i < batch.n_tokens; i++) {
            logits->write((const char *) row_of(context, i), (std::streamsize) vocab * sizeof(float));
        }
        if (first + batch.n_tokens == prompt.size()) {
            next = greedy(row_of(context, batch.n_tokens - 1), vocab);
        }
    }
    llama_batch_free(batch);
    return next;
}

Timed generate(llama_context * context, const std::vector<llama_token> & prompt, int vocab, const Options & o) {
    std::ofstream logits;
    if (!o.logits.empty()) {
        logits.open(o.logits, std::ios::binary);
    }
    Timed timed;
    double begun = seconds();
    llama_token next = prefill(context, prompt, vocab, o.batch, o.logits.empty() ? nullptr : &logits);
    timed.prefill = seconds() - begun;
    if (!o.logits.empty() && !logits.flush()) {
        throw std::runtime_error(o.logits + ": cannot be written");
    }
    timed.ids.push_back(next);
    while ((int) timed.ids.size() < o.tokens) {
        begun = seconds();
        if (llama_decode(context, llama_batch_get_one(&next, 1)) != 0) {
            throw std::runtime_error("llama_decode failed");
        }
        next = greedy(row_of(context, -1), vocab);
        timed.decode.push_back(seconds() - begun);
        timed.ids.push_back(next);
    }
    return timed;
}

template <typename T> std::string listed(const std::vector<T> & items) {
    std::ostringstream out;
    out.precision(9);
    out << "[";
    for (size_t i = 0; i < items.size(); i++) {
        out << (i ? ", " : "") << items[i];
    }
    out << "]";
    return out.str();
}

void print(const Options & o, const std::vector<llama_token> & prompt, const Timed & timed, double load) {
    double decode = 0;
    for (double each : timed.decode) {
        decode += each;
    }
    std::printf("{\"name\": \"llama.cpp\", \"version\": \"%s\", \"threads\": %d, \"mmap\": %s, \"repack\": %s,\n"
                " \"prompt_ids\": %s,\n \"ids\": %s,\n \"load_seconds\": %.6f,\n"
                " \"prefill\": {\"tokens\": %zu, \"seconds\": %.9f},\n"
                " \"decode\": {\"tokens\": %zu, \"seconds\": %.9f, \"each\": %s}}\n",
                METALTAIL_PEER_VERSION, o.threads, o.mmap ? "true" : "false", o.repack ? "true" : "false",
                listed(prompt).c_str(), listed(timed.ids).c_str(), load, prompt.size(), timed.prefill,
                timed.decode.size(), decode, listed(timed.decode).c_str());
}

// llama.cpp reports what it loads at length; only its warnings and errors are passed on.
void quiet(ggml_log_level level, const char * text, void *) {
    static bool shown = false;
    if (level != GGML_LOG_LEVEL_CONT) {
        shown = level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN;
    }
    if (shown) {
        std::fputs(text, stderr);
    }
}

void run(const Options & o) {
    const std::vector<llama_token> prompt = read_ids(o.ids);
    const double begun = seconds();
    llama_model_params model_params = llama_model_default_params();
    model_params.load_mode = o.mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    model_params.use_extra_bufts = o.repack;
    model_params.kv_overrides = o.overrides.data();
    llama_model * model = llama_model_load_from_file(o.model.c_str(), model_params);
    if (model == nullptr) {
        throw std::runtime_error(o.model + ": llama.cpp cannot load it");
    }
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (llama_token id : prompt) {
        if (id >= vocab) {
            throw std::runtime_error(o.ids + ": id " + std::to_string(id) + " of a vocabulary of " + std::to_string(vocab));
        }
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = o.context != 0 ? o.context : prompt.size() + o.tokens;
    params.n_batch = o.batch;
    params.n_ubatch = o.batch;
    params.n_threads = o.threads;
    params.n_threads_batch = o.threads;
    params.type_k = params.type_v = o.exact_kv ? GGML_TYPE_F32 : GGML_TYPE_F16;
    if (o.exact_kv) {
        // The fused kernel works in f16 whatever the cache holds.
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        throw std::runtime_error("llama.cpp cannot make a context");
    }
    const double load = seconds() - begun;
    const Timed timed = generate(context, prompt, vocab, o);
    print(o, prompt, timed, load);
    llama_free(context);
    llama_model_free(model);
}

} // namespace

int main(int argc, char ** argv) {
    try {
        const Options o = parse(argc, argv);
        if (!o.verbose) {
            llama_log_set(quiet, nullptr);
        }
        llama_backend_init();
        run(o);
        llama_backend_free();
    } catch (const std::exception & e) {
        std::fprintf(stderr, "error: %s\n%s", e.what(), argc < 2 ? USAGE : "");
        return 1;
    }
    return 0;
}
