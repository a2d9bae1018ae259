"""Tables of research: the papers' experiments, warm starts, sensitivities; verdicts come from their programs."""

from __future__ import annotations

import re
from typing import Any

from render import Numbers, Rows, grid, text, wrapped
from score_tables import CODE, NOVEL, WIKI


def experiments(lab: Any) -> Rows:
    files = [lab.text(WIKI), *lab.texts(NOVEL, CODE)]
    only, size = lab.pick(("ranks,matched,domain,length,bounds", "2048"), ("bounds", "256"))
    lab.run(
        *("python", "-m", "research.experiments", "--only", only, "-m", "M.gguf", "--bases", "calib.safetensors"),
        *(f"-f{file}" for file in files),
        *("-c", size, "-o", "experiments"),
    )
    lines = lab.read("experiments/report.md").splitlines()
    found = [match for line in lines if (match := re.match(r"- \((\d)\) (.+?\?) (.+)$", line))]
    if not found:
        raise ValueError("experiments: expected verdicts in report.md, found none")
    return [{"number": int(match[1]), "question": match[2], "answer": match[3]} for match in found]


def verdicts_markdown(rows: Rows) -> str:
    lines = [f"{row['number']}. *{row['question'][0].upper()}{row['question'][1:]}* {row['answer']}" for row in rows]
    return "\n".join(wrapped(line, "   ") for line in lines)


WARM = re.compile(r"(?P<criterion>.+): (?P<answer>met|not met|not measured) \((?P<found>.+), n = (?P<n>\d+)\)")
COPY = re.compile(r"for comparison, (?P<criterion>a perfect copy of .+): (?P<found>KL .+) \(n = (?P<n>\d+)\)")


WARMSTART = ("python", "-m", "research.warmstart")


def warm_start(lab: Any) -> Rows:
    prompts = (*WARMSTART, "prompts", "-m", "M.gguf")
    size = lab.pick(("--words", "60,180", "-n", "4"), ("--words", "20", "-n", "3"))
    valid, test = lab.text("wikitext2.valid.txt"), lab.text(WIKI)
    lab.run(*prompts, "-f", valid, "--test-share", "0", *size, "-o", "train.jsonl")
    lab.run(*prompts, "-f", test, "--test-share", "1", *size, "-o", "test.jsonl")
    train = (*WARMSTART, "train", "-m", "M.gguf", "-f", "train.jsonl", "--slots", "16")
    lab.run(*train, "--epochs", lab.pick("6", "1"), "-o", "w16.safetensors")
    evaluate = (*WARMSTART, "evaluate", "-m", "M.gguf", "--warm-file", "w16.safetensors", "-f", "test.jsonl")
    done = lab.run(*evaluate, "--targets", lab.pick("3", "1"), "-r", "1", "-t", "1", "-o", "warm")
    rows: Rows = []
    slots = 0
    for line in done.stdout.splitlines():
        if heading := re.search(r", m = (\d+), pairs", line):
            slots = int(heading[1])
        elif found := WARM.fullmatch(line.strip()) or COPY.fullmatch(line.strip()):
            rows.append({"slots": slots, "answer": "", **found.groupdict(), "n": int(found["n"])})
    if not rows:
        raise ValueError(f"warmstart evaluate: expected criteria, found {done.stdout[-400:]!r}")
    return rows


def warm_markdown(rows: Rows) -> str:
    titles = {"slots": "m", "criterion": "criterion of the paper", "found": "measured", "n": "n", "answer": "result"}
    return grid(rows, [(title, text(key)) for key, title in titles.items()], left=2)


def warm_numbers(rows: Rows) -> Numbers:
    """kl_M, saving_M (percent), drop_M (points; warm to the end), copy_M: the leading number of the measured value."""
    kinds = {"latency": "saving", "mean KL": "kl", "warm to the end": "drop", "perfect copy": "copy"}
    numbers = {}
    for row in rows:
        for word, kind in kinds.items():
            value = re.search(r"[+-]?\d+(?:\.\d+)?(?:e-?\d+)?", row["found"])
            if word in row["criterion"] and value:
                numbers[f"{kind}_{row['slots']}"] = value[0].lstrip("+")
    return numbers


def sensitivity(lab: Any) -> Rows:
    lab.run("python", "-m", "research.plot_sensitivities", "calib.safetensors", "-o", "sensitivity.png")
    lab.keep("sensitivity.png")
    return [{"picture": "sensitivity.png"}]
