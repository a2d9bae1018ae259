"""What prompts are made of: instructions in several wordings, and the rules by which a passage is reworded."""

from __future__ import annotations

# task -> wordings of one instruction, which stands before the passage; the first is the usual one
INSTRUCTIONS = {
    "summary": (
        "Summarise the following text in one sentence.",
        "Give a one-sentence summary of the text below.",
        "Please sum up this passage in a single sentence.",
        "In one sentence, what does the following passage say?",
    ),
    "title": (
        "Write a title for the following text.",
        "Suggest a short title for the text below.",
        "Please give this passage a title.",
        "What would be a good title for the following passage?",
    ),
    "topic": (
        "What is the main topic of the text below?",
        "Name the main topic of the following text.",
        "Please say what this passage is mainly about.",
        "What is the following passage mostly about?",
    ),
    "facts": (
        "List the most important facts of the following text.",
        "Write down the key facts given in the text below.",
        "Please list what is most important in this passage.",
        "Which facts in the following passage matter most?",
    ),
    "simple": (
        "Rewrite the following text in simple words for a child.",
        "Explain the text below in words that a child understands.",
        "Please put this passage into simple language for children.",
        "How would you tell a child what the following passage says?",
    ),
    "quiz": (
        "Write a quiz question about the following text.",
        "Think of one quiz question on the text below.",
        "Please ask one question that this passage answers.",
        "Which quiz question could be asked about the following passage?",
    ),
}
# Tasks with an answer that is known without a human label: it follows from how the prompt was made.
LABELLED = {
    "year": (
        "Which year does the following text mention? Answer with the year only.",
        "Name the year that stands in the text below, and nothing else.",
        "Please write only the year mentioned in this passage.",
        "What year is mentioned in the following passage? Give just the year.",
    ),
    "cloze": (
        "The last word of the following text is missing. Write that word only.",
        "The text below breaks off before its last word. Answer with the missing word only.",
        "Please complete this passage with its one missing last word, and write nothing else.",
        "Which word completes the following passage? Give just the word.",
    ),
    "number": (
        "Does the last sentence contain a number? Answer yes or no.",
        "Say yes or no: is there a number in the last sentence?",
        "Please answer with yes or no whether the last sentence has a number in it.",
        "Is a number part of the last sentence? Yes or no.",
    ),
}


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """a/b, c/d, … -> (a, b), (c, d), …"""
    listed = (pair.split("/") for pair in " ".join(text.split()).split(", "))
    return tuple((one, other) for one, other in listed)


# Whole words that can stand for each other in most sentences of plain prose.
SYNONYMS = _pairs(
    """
    began/started, big/large, many/numerous, although/though, used/employed, made/produced, shows/displays,
    built/constructed, received/got, said/stated, small/little, important/significant, different/distinct,
    main/chief, whole/entire, city/town, children/kids, film/movie, road/street, ship/vessel, usually/normally,
    mostly/mainly, quickly/rapidly, almost/nearly, finally/eventually, later/afterwards, found/discovered,
    described/portrayed, gave/provided, stopped/halted, allowed/let, required/needed, attempted/tried,
    ended/finished, often/frequently, buy/purchase, approximately/roughly, located/situated, among/amongst,
    area/region, story/tale, show/programme, previously/earlier, noted/remarked, included/comprised, may/might,
    each/every
    """
)
# The same in one direction only.
ONE_WAY = _pairs(
    """
    in order to/to, upon/on, such as/like, as well as/and also, before/prior to, during/in the course of, due
    to/owing to, according to/as stated by, while/whereas, caused/brought about, several/a number of, near/close to,
    throughout/all through, initially/at first, however/still, create/make, known/recognised, called/named,
    within/inside
    """
)
NUMERALS = _pairs("two/2, three/3, four/4, five/5, six/6, seven/7, eight/8, nine/9, ten/10, eleven/11, twelve/12")
