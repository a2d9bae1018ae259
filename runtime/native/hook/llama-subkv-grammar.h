// llama-subkv-grammar.h: limits of the grammars that requests bring. src/llama-grammar.cpp calls these functions; the
// build includes this header in front of it. Part of libllama.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_grammar_element;

// Throws std::runtime_error if the text is longer than 1 MiB, nests groups more than 2,000 deep, has a class of more than
// 4,096 characters, a repetition whose minimum is above its maximum, or repetitions that expand to more than the work
// of one token. Other errors are left to the parser. A text that is too long becomes empty, because the parser logs it.
void llama_subkv_grammar_text(const char *& text);

// Returns false if a rule begins with itself, or can neither end nor begin with a character, because no stack would
// remain. A rule that begins with itself behind rules that may be empty is accepted as long as such a rule has no
// alternative without symbols, because the limit on a token's work also ends it.
bool llama_subkv_grammar_rules(const std::vector<std::vector<llama_grammar_element>> & rules);

// Counts one step of the expansion of a stack, which is compared with n_stacks others. Without a limit the number of
// steps is exponential in the size of some grammars. Throws std::runtime_error above the work of one token.
void llama_subkv_grammar_step(const std::vector<const llama_grammar_element *> & stack, size_t n_stacks);

// A token was accepted, so the next one begins.
void llama_subkv_grammar_token();
