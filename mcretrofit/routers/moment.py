"""Second moment of a segment's keys: `s_i = u^T G_i u`, `G_i = sum_j k_j k_j^T` = sum of `(u . k_j)^2`.

Beyond the paper. With unit keys a match adds 1 and n others n / K on average. `G` is symmetric: only
blocks on and above the diagonal are kept, those above it doubled.
"""

from __future__ import annotations

from mcretrofit.routers._moment import score, settled, summarise, width

__all__ = ["POSITIVE", "TEMPERATURE", "UNIT", "USES_QUERY", "score", "settled", "summarise", "width"]

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = True, True, True, 10.0
