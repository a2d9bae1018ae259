"""A program of test_closed.py: `python closing.py MODEL LAYOUT here|thread|fork` closes an object of every public class
of subkv that can be closed, and of those that depend on it. Then it calls every public method and reads every property.

Prints one JSON object each: class, name, the error. A line is printed before, so that the last one names the call that
ended the process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import subkv
from subkv.base.errors import SubkvError
from subkv.engine.cache import choose_cache, ordinary
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama
from subkv.engine.model import Model
from subkv.engine.observer import Observer
from subkv.engine.request import CacheRequest
from subkv.format.layout import Layout
from subkv.native.gguf import Gguf

# isort: split
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


def closable() -> set[str]:
    """Names of all public classes of the package with close()."""
    found = set()
    for module in pkgutil.walk_packages(subkv.__path__, "subkv."):
        if module.name.startswith("subkv.torch"):
            continue
        for name, kind in vars(importlib.import_module(module.name)).items():
            own = inspect.isclass(kind) and kind.__module__ == module.name
            if own and not name.startswith("_") and callable(getattr(kind, "close", None)):
                found.add(name)
    return found


def llama(model: Path, **more: Any) -> Llama:
    llm = Llama(model, **OPTIONS, **more)
    llm.eval(list(range(20, 60)))
    return llm


def objects(model: Path, layout: Path) -> Iterator[tuple[str, Any, Callable[[], None]]]:
    """Name, object, and what closes it."""
    for kv_cache in ("f16", "subkv"):
        more: dict[str, Any] = {"kv_cache": kv_cache}
        llm = llama(model, **more)
        yield "Llama", llm, llm.close
        for part in ("_ctx", "_model", "loaded_model"):
            llm = llama(model, **more)
            yield type(getattr(llm, part)).__name__, getattr(llm, part), llm.close
        llm = llama(model, **more)
        yield "LlamaTokenizer", llm.tokenizer(), llm.close
    llm = llama(model, draft_model=LlamaPromptLookupDecoding())
    yield "CheckedDrafts", llm.draft_model, llm.close
    loaded = Model(model)
    yield "Model", loaded, loaded.close
    for choice in (ordinary(), choose_cache(model, CacheRequest("subkv"))):
        context = Model(model).context(choice, ContextOptions(128, n_threads=1))
        yield "Context", context, context.close
    observer = Observer(0)
    yield "Observer", observer, observer.close
    opened = Layout(layout)
    yield "Layout", opened, opened.close
    file = Gguf(model)
    yield "Gguf", file, file.close


def uses(name: str, target: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every public method and property, special methods, and how to use them."""
    if name == "LlamaTokenizer":  # of llama_cpp; holds the model
        yield "encode", lambda: target.encode("a text")
        yield "decode", lambda: target.decode([20, 21])
        return
    for member in dir(type(target)):
        if member.startswith("_") or member in ("close", "open") or member in vars(target):
            continue
        yield member, lambda member=member: used(getattr(target, member))
    if callable(target):
        yield "__call__", lambda: target([1, 2] if "Draft" in name else "a text")
    if hasattr(type(target), "__enter__"):
        yield "__enter__", target.__enter__
    if name == "Llama":
        yield "pickle", lambda: pickle.dumps(target)


def used(member: Any) -> None:
    """Call a method with plausible arguments; a property has been read."""
    if not callable(member):
        return
    needed = [
        parameter
        for parameter in inspect.signature(member).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD,)
    ]
    result = member(*([b"a text"] * len(needed)))
    if inspect.isgenerator(result):
        next(result)


def report(name: str, target: Any) -> None:
    for member, use in uses(name, target):
        print(json.dumps({"before": f"{name}.{member}"}), flush=True)
        try:
            use()
            error = ""
        except SubkvError as caught:
            error = str(caught)
        except Exception as caught:  # not one of ours
            error = f"{type(caught).__name__}: {caught}"
        print(json.dumps({"class": name, "name": member, "error": error}), flush=True)


def main(model: Path, layout: Path, where: str) -> None:
    print(json.dumps({"closable": sorted(closable())}), flush=True)
    for name, target, close in objects(model, layout):
        close()
        close()  # may be called twice
        if where == "here":
            report(name, target)
        elif where == "thread":
            thread = threading.Thread(target=report, args=(name, target))
            thread.start()
            thread.join()
        elif child := os.fork():
            assert os.waitpid(child, 0)[1] == 0, name
        else:
            report(name, target)
            os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
