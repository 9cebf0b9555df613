"""Names of the results that both sides of a comparison yield."""

from __future__ import annotations

NEXT, MASKED, ORDER, CLASSES = "next-token logits", "masked-token logits", "order logits", "class logits"
OUTPUTS = (NEXT, MASKED, ORDER, CLASSES)
"""[b, s, v], [b, s, v], [b, 2] and [b, classes]."""
