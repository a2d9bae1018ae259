"""The built-in texts of `python -m research.evaluate --held-out`, and the table over them."""

from __future__ import annotations

from converter import builtin, held_out
from research.float32 import tables


def test_held_out_texts_share_no_lines_with_calibration() -> None:
    """No line of more than 30 characters occurs in a calibration text, and the names are kinds."""
    joined = "".join(text.data.decode() for text in builtin.read())
    texts = held_out.read()
    assert [text.source.name for text in texts] == [
        *("chat", "chinese", "code", "data", "german", "mathematics", "russian"),
    ]
    for text in texts:
        data = text.data.decode()
        assert 3000 < len(text.data) < 20000 and not set(data) & set("\f\r\0\ufffd"), text.source.name
        shared = [line for line in data.splitlines() if len(line.strip()) > 30 and line.strip() in joined]
        assert not shared, (text.source.name, shared)
    assert "User: " in texts[0].data.decode() and texts[0].special


def test_worst_text_is_named() -> None:
    rows = [
        {"name": name, "bpe": 4.0, "text": text, "mean_kld": kld, "mean_kld_stderr": 0.001, "same_top": 1 - kld}
        for text, a, b in (("x", 0.1, 0.2), ("y", 0.3, 0.1))
        for name, kld in (("one", a), ("two", b))
    ]
    lines = tables.over_texts(rows).splitlines()
    assert lines[2:] == [
        "| one | 4.00 | 0.2 | 0.3 ± 0.001 | y | 70.00% |",
        "| two | 4.00 | 0.15 | 0.2 ± 0.001 | x | 80.00% |",
    ]
