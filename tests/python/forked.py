"""A program of test_lifetime.py and test_wheels.py: `python forked.py MODEL CACHE` computes, then forks."""

import multiprocessing
import os
import sys

from subkv.engine.llama import Llama


def make():
    return Llama(sys.argv[1], kv_cache=sys.argv[2], n_ctx=256, n_threads=2, n_threads_batch=2, verbose=False)


def read(llm):
    llm.reset()
    llm.eval(list(range(10, 90)))
    return llm._ctx.get_logits_ith(-1)[0]


def nothing():
    pass


def own():
    with make() as llm:
        assert read(llm) == expected


def parents():
    try:
        read(llm)
    except RuntimeError as error:
        assert "expected the process" in str(error) and "create another Llama there" in str(error)
    else:
        raise AssertionError("not refused")
    llm.close()


llm = make()
expected = read(llm)
processes = multiprocessing.get_context("fork")
for work in (nothing, own, parents):
    child = processes.Process(target=work)
    child.start()
    child.join(60)
    if child.exitcode != 0:
        child.kill()
        sys.exit(f"{work.__name__}: exit code {child.exitcode}")
    assert read(llm) == expected
if os.fork() == 0:
    sys.exit(0)  # as a whole interpreter, with the parent's object alive
assert os.wait()[1] == 0
assert read(llm) == expected
print("done")
