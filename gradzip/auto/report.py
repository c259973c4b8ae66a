"""What people see of a decision: plain numbers, and a line of text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..cost import Link
from .plans import NONE, Key, Plan

# Share of a core that an idle engine may take without a remark. Horovod's cycles of 1 ms take 0.05.
BUSY = 0.03


def report(
    chosen: Plan, plans: Sequence[Plan], keys: Sequence[Key], titles: Sequence[str], size: int, link: Link | None
) -> dict[str, Any]:
    """A decision, as plain numbers and strings.

    Args:
        plans: that were tried.
        keys: of all parameters.
        titles: of the methods.
        size: the world size.
    """
    numels: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for key in keys:
        title = titles[chosen.methods.get(key, NONE)]
        numels[title] += math.prod(key[1])
        counts[title] += 1
    total = sum(numels.values()) or 1
    return {
        "plan": chosen.title,
        "ranks": size,
        "share": {title: numel / total for title, numel in numels.most_common()},  # of the elements, by method
        "parameters": dict(counts),
        "ms": {plan.title: plan.seconds * 1000 for plan in plans if plan.seconds is not None},
        "predicted_ms": {plan.title: plan.predicted * 1000 for plan in plans if plan.predicted is not None},
        "link": None if link is None else asdict(link),
    }


def explain(report: dict[str, Any], simple: bool, before: str | None) -> str:
    """A decision, and why, in one line.

    Args:
        simple: whether nothing is compressed, but maybe sent in 16 bits.
        before: title of the plan that was in charge.
    """
    if report["ranks"] == 1:
        return "one rank: nothing to send, nothing is compressed"
    title = report["plan"]
    if simple:
        what = f"no compression pays here: {_name(title)}"
    else:
        shares = ", ".join(f"{share:.1%} {_name(method)}" for method, share in report["share"].items())
        what = f"{title} ({shares} of the elements)"
    if before is not None:
        what = f"still {what}" if before == title else f"no longer {_name(before)}, but {what}"
    times = sorted(report["ms"].items(), key=lambda item: item[1])
    listed = ", ".join(f"{_name(plan)} {ms:.1f}" for plan, ms in times)
    network = ""
    if link := report["link"]:
        network = f", {link['bandwidth'] * 8e-9:.3g} Gb/s, {link['latency'] * 1e6:.0f} us"
        if link["background"] > BUSY:
            network += f"; the engine takes {link['background']:.0%} of a core: with Horovod, try --cycle-time-ms 20"
    return f"{what}; ms per step: {listed}; {report['ranks']} ranks{network}"


def _name(title: str) -> str:
    return "fp32" if title == "none" else title
