"""Rows of results as `eval` and `sweep` write them, made up."""

from __future__ import annotations

import json

from mcretrofit.results import read


def row(segment=64, score=0.8, base=0.5, *, variant="ssc", half=0.1, n=16, **more):
    """A row of recall with the interval `score - base` +- half."""
    apart = score - base
    made = {"model": "m", "variant": variant, "segment": segment, "task": "niah_single_1"}
    made |= {"metric": "accuracy", "length": 512, "depth": None, "dialect": "compact", "seed": 1}
    made |= {"score": score, "base_score": base, "low": apart - half, "high": apart + half, "n": n}
    made["verdict"] = "helps" if apart > half else "hurts" if apart < -half else "no effect"
    return {**made, "cache_bytes": 100_000 // segment, **more}


def text(segment=64, score=2.0, base=2.0, **more):
    """A row of bits per byte."""
    place = {"task": "perplexity", "metric": "bits_per_byte", "dialect": "text"}
    verdict = "hurts" if score > base * 1.005 else "no effect"
    return row(segment, score, base, **{**place, "verdict": verdict, **more})


def base(**more):
    """A row of the unmodified model alone."""
    bare = {"variant": "base", "segment": None, "verdict": "base", "low": None, "high": None}
    return {**row(score=0.5), **bare, "cache_bytes": 0, **more}


def grid():
    """Two settings on two lengths and three depths, text by position, controls."""
    rows = []
    for segment, score in ((64, 0.9), (128, 0.7)):
        for length in (512, 1024):
            for depth in (0.0, 50.0, 100.0):
                place = {"length": length, "depth": depth}
                checks = {"random": 0.4, "recent": 0.5, "none": 0.1, "oracle": None}
                rows.append(row(segment, score, **place, controls=checks, prefill_ratio=1.5))
        windows = [[0, 512, 2.5, 2.5], [512, 1024, 2.1, 2.11], [1024, 2048, 2.0, 2.02]]
        rows.append(text(segment, length=2048, by_position=windows))
    return rows


def save(folder, rows, *lines):
    """A run folder."""
    folder.mkdir(exist_ok=True)
    lines = [*(json.dumps(one) for one in rows), *lines]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def found(folder, rows, *lines):
    return read(save(folder / "run", rows, *lines))
