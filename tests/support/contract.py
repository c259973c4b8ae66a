"""Shared by the contract tests: gradients and expected averages."""

import dataclasses
import io
import math
import zlib

import torch

import gradzip
from observed import exact

SHAPES = {"b": (48,), "v": (32, 8, 3, 3), "w": (64, 48)}
STEPS = 3
AMP_STEPS = 7
OVERFLOWS = 2  # the step in which one gradient of the last rank is not finite
AMP_SCALES = [1024.0] * 3 + [512.0] * 3 + [1024.0]  # with GradScaler(init_scale=1024.0, growth_interval=3)

TIMEOUT = 280  # seconds for all scenarios; far more than needed, less than pytest's limit of 300


def gradient(name, rank, step, shape=None):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}/{step}".encode()))
    return torch.randn(shape or SHAPES[name], generator=generator)


def each(steps, of_rank, names=SHAPES, size=2):
    """Gradients of_rank(name, rank, step) of each step: [{name: [of rank 0, ...]}, ...]."""
    return [{name: [of_rank(name, r, step) for r in range(size)] for name in names} for step in steps]


def through_file(saved):
    """What torch.load returns of a saved state dict, with plain tensors only."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_conservation(group, gradients, steps, roundings, above):
    """Assert that error feedback loses nothing: sum of averages + mean residual = sum of mean gradients.

    With residual_decay, what is left of each step fades: r = beta (r + mean gradient - average).

    Args:
        gradients: gradients(step) returns those of all ranks.
        roundings: how many numbers of the size of the largest residual a step rounds, for the bound on the difference.
        above: how many times as large as this bound a residual is at least: it is not just rounding.
    """
    size, lost, largest = len(group.compressors), 0.0, 0.0
    decay = group.compressors[0].residual_decay
    for step in range(steps):
        grads = gradients(step)
        averages = group.average(grads, "w")
        assert all(torch.equal(average, averages[0]) for average in averages)
        lost = decay * (lost + sum(g.double() for g in grads) / size - averages[0].double())
        states = [compressor.states["w"] for compressor in group.compressors]
        largest = max(largest, *(state.residual.abs().max().item() for state in states))
    bound = steps * roundings * 2**-24 * largest
    residual = sum(state.residual.double() for state in states) / size
    if getattr(states[0], "owner_residual", None) is not None:  # after a scatter-reduce, of the averages of partitions
        for state in states:
            assert state.owner_residual.abs().max() > bound
            for (start, stop), owned in owned_pieces(state):
                residual[start:stop] += owned.double()
    assert (residual - lost.view(-1)).abs().max() < bound
    assert residual.abs().max() > above * bound


def owned_pieces(state):
    """The pieces of a rank's owner residual, each with its range of the group's elements."""
    pieces = state.owner_residual.split([stop - start for start, stop in state.owner_ranges])
    return zip(state.owner_ranges, pieces, strict=True)


def kept_residual(fields):
    """The residual in a parameter's saved fields, with what the rank keeps as the owner of a partition; or None."""
    residual, owed = fields.get("residual"), fields.get("owner_residual")
    if owed is not None:
        residual = residual.clone()
        residual.view(-1)[fields["owner_start"] :][: owed.numel()].add_(owed, alpha=fields["size"])
    return residual


class Expected:
    """Expected averages of gradients in buckets, computed with LocalGroups.

    A unit is the tuple of the names of parameters that are compressed together: those of a bucket, a method, a step
    number, and with equal `groups_by`. Each has a LocalGroup of its own. A method of vectors gets their gradients as
    one, which are concatenated here. When buckets change, its parameters keep their residuals and momenta, which are
    moved here in plain torch. Parameters of other methods keep what state dicts have of them.

    Args:
        method: a spec or a compressor.
        most_numel: elements of a unit, at most, unless it is one parameter.
    """

    def __init__(self, method, prefix="", size=2, most_numel=math.inf):
        self.compressor = gradzip.parse(method) if isinstance(method, str) else method
        self.prefix, self.size, self.most_numel = prefix, size, most_numel
        self.groups = {}  # by unit
        self.shapes = {}  # by name
        self.kept = [{} for _ in range(size)]  # by name, of parameters without a group: tensors by field
        self.saved = [{} for _ in range(size)]  # by name, the same: state dicts
        self.sent = [0] * size  # bytes, by groups that are no more

    @property
    def bytes_sent(self):
        """Payload bytes so far, of the rank that sent most."""
        groups = self.groups.values()
        return max(
            sent + sum(group.compressors[r].traffic.bytes_sent for group in groups) for r, sent in enumerate(self.sent)
        )

    def averages(self, steps, buckets=None):
        """Return the averages of all steps.

        buckets: the names in each bucket, for each step. None: all gradients of a step are in one.
        """
        buckets = buckets or [[list(grads)] for grads in steps]
        return [self.average(grads, of_step) for grads, of_step in zip(steps, buckets, strict=True)]

    def average(self, grads, buckets=None):
        """Return the averages of one step. grads: {name: [of rank 0, ...]}."""
        self.shapes |= {name: per_rank[0].shape for name, per_rank in grads.items()}
        units = [unit for bucket in buckets or [list(grads)] for unit in self.units(bucket)]
        present = {name for unit in units for name in unit}
        for unit in list(self.groups):
            if unit not in units and not present.isdisjoint(unit):
                self.keep(unit)
        averages = {}
        for unit in units:
            if unit not in self.groups:
                self.groups[unit] = self.group(unit)
            per_rank = list(grads[unit[0]])
            if len(unit) > 1:
                method = self.method(unit)
                if not method.vectors:
                    of_ranks = [{self.prefix + name: grads[name][r] for name in unit} for r in range(self.size)]
                    average = self.groups[unit].step(of_ranks)[0]
                    averages |= {name: average[self.prefix + name] for name in unit}
                    continue
                clips = [[clipped(method, grads[name][r], self.size) for name in unit] for r in range(self.size)]
                per_rank = [self.joined(unit, of_rank) for of_rank in clips]
            average = self.groups[unit].average(per_rank, self.name(unit))[0].to(grads[unit[0]][0].dtype)
            averages |= self.split(unit, average)
        return {name: averages[name] for name in grads}

    def split(self, unit, tensor):
        """Return the parts of a unit's tensor by name."""
        parts = tensor.view(-1).split([self.shapes[name].numel() for name in unit])
        return {name: part.view(self.shapes[name]) for name, part in zip(unit, parts)}

    def units(self, bucket):
        """Return the units of a bucket."""
        units = {}
        for name in bucket:
            method = self.compressor.method_for(name, self.shapes[name])
            bypasses = method.bypasses(torch.empty(self.shapes[name], device="meta"))
            common = None if bypasses else method.groups_by(self.shapes[name])
            units.setdefault(name if common is None else (id(method), common, self.step(name)), []).append(name)
        return [tuple(names) for whole in units.values() for names in self.divided(whole)]

    def divided(self, names):
        """Divide names into runs of at most `most_numel` elements."""
        runs = [[]]
        for name in names:
            if runs[-1] and sum(self.shapes[other].numel() for other in [*runs[-1], name]) > self.most_numel:
                runs.append([])
            runs[-1].append(name)
        return runs

    def step(self, name):
        """Return how often a parameter was averaged. One that joins late is not compressed with others."""
        for unit, group in self.groups.items():
            if name in unit:
                return max((state.step for state in group.compressors[0].states.values()), default=0)
        if name in self.saved[0]:
            saved = self.saved[0][name]
            states = [one.get("states", {}).get(self.prefix + name, {}) for one in (saved, *saved.get("parts", ()))]
            return max(state.get("step", 0) for state in states)
        return self.kept[0].get(name, {"step": 0})["step"]

    def method(self, unit):
        """Return the method of a unit."""
        return self.compressor.method_for(unit[0], self.shapes[unit[0]])

    def selected(self, unit):
        """Return the method of a unit, with all phases that it will have."""
        now, later = self.method(unit), self.compressor.later_methods(unit[0])
        if not later:
            return now
        phases = {start: method for start, method in self.compressor.phases.items() if method in [now, *later]}
        return gradzip.Phases(phases)

    def joined(self, unit, tensors):
        """Return the tensors of a unit's parameters as one, which is not bypassed as a vector would be."""
        joined = self.method(unit).joined_shape(self.shapes[unit[0]])
        return torch.cat([t.reshape(-1) for t in tensors]).view(joined if len(joined) > 1 else (1, -1))

    def name(self, unit):
        first, *others = (self.prefix + name for name in unit)
        return f"{first} and {len(others)} more" if others else first

    def group(self, unit):
        """Return a new group that continues with what was kept of these parameters."""
        compressor = self.compressor
        if compressor.selects_by_name:  # which the name of a group would not match
            compressor = self.selected(unit)
        if len(unit) > 1 and clip_norm(compressor) is not None:
            compressor = dataclasses.replace(compressor, clip_norm=None)  # parameters are clipped one by one
        group = gradzip.LocalGroup(compressor, self.size)
        for compressor, saved in zip(group.compressors, self.saved):
            compressor.bucket_cap_mb = 1e6  # a unit is one bucket
            if found := [saved.pop(name) for name in unit if name in saved]:
                compressor.load_state_dict(merged(found))
        if unit[0] in self.kept[0]:
            for rank, compressor in enumerate(group.compressors):
                parts = [self.kept[rank].pop(name) for name in unit]
                state = {"step": max(part.pop("step") for part in parts), "rank": rank, "size": self.size}
                for field in parts[0]:
                    tensors = [part[field] for part in parts]
                    state[field] = self.joined(unit, tensors) if len(unit) > 1 else tensors[0]
                compressor.load_state_dict({"method": type(compressor).__name__, "states": {self.name(unit): state}})
        return group

    def keep(self, unit):
        """Remove a unit's group. Keep, by name, residuals, also those of the partitions that ranks own, and momenta."""
        group, vectors = self.groups.pop(unit), self.method(unit).vectors
        for rank, compressor in enumerate(group.compressors):
            self.sent[rank] += compressor.traffic.bytes_sent
            if not vectors:
                self.saved[rank] |= {name: only(compressor.state_dict(), self.prefix + name) for name in unit}
                continue
            (state,) = compressor.states.values()
            fields = {field: getattr(state, field, None) for field in ("residual", "velocity", "momentum")}
            fields = {field: tensor.clone() for field, tensor in fields.items() if tensor is not None}
            if getattr(state, "owner_residual", None) is not None:
                fields.setdefault("residual", torch.zeros(state.numel))
                for (start, stop), owed in owned_pieces(state):
                    fields["residual"][start:stop].add_(owed, alpha=self.size)
            parts = {field: self.split(unit, tensor) for field, tensor in fields.items()}
            for name in unit:
                self.kept[rank][name] = {"step": state.step} | {field: of[name] for field, of in parts.items()}


def only(state_dict, name):
    """A state dict of one of its parameters."""
    found = dict(state_dict)
    if "parts" in found:
        found["parts"] = [only(part, name) for part in found["parts"]]
    for field in ("states", "steps"):
        if field in found:
            found[field] = {key: value for key, value in found[field].items() if key == name}
    return found


def merged(state_dicts):
    """One state dict of those of several parameters."""
    found = dict(state_dicts[0])
    if "parts" in found:
        found["parts"] = [merged(of_part) for of_part in zip(*(one["parts"] for one in state_dicts))]
    for field in ("states", "steps"):
        if field in found:
            found[field] = {name: value for one in state_dicts for name, value in one[field].items()}
    return found


def clip_norm(method):
    """The norm to which a method clips each parameter's gradient, or None."""
    return getattr(method, "clip_norm", None)


def clipped(method, grad, size):
    """What a method compresses of one of a bucket's gradients: float32, if it is clipped."""
    if clip_norm(method) is None:
        return grad
    norm = torch.linalg.vector_norm(grad.float(), dtype=torch.float64)
    return grad.float() * (method.clip_norm / size**0.5 / norm).clamp(max=1.0)


def average_bucket(group, grads):
    """The averages by name of one bucket of gradients {name: [of rank 0, ...]}, with the states of a LocalGroup."""
    reference = Expected(group.compressors[0], size=len(group.compressors))
    reference.shapes = {name: per_rank[0].shape for name, per_rank in grads.items()}
    reference.groups = dict.fromkeys(reference.units(list(grads)), group)
    return reference.average(grads)


def expected(method, gradients, prefix=""):
    """The averages of the last step, where all gradients are in one bucket."""
    return Expected(method, prefix, size=len(next(iter(gradients[0].values())))).averages(gradients)[-1]


def assert_averages(compressor, per_rank, wanted):
    """Assert that all ranks have the same bits, and that these are the wanted ones.

    An engine adds in an order of its own. Averages that it adds equal the wanted ones up to rounding.

    Args:
        per_rank: averages by name, of each rank.
    """
    for got in per_rank:
        assert got.keys() == wanted.keys()
        for name, want in wanted.items():
            assert torch.equal(got[name], per_rank[0][name]), name
            method = compressor.method_for(name, want.shape)
            used = [method, *compressor.later_methods(name)] if compressor.selects_by_name else [compressor]
            if method.bypasses(want):
                rounding = 4 * torch.finfo(want.dtype).eps
                torch.testing.assert_close(got[name], want, rtol=rounding, atol=rounding)
            elif all(map(exact, used)):
                assert torch.equal(got[name], want), name
            elif isinstance(method, gradzip.Cast):  # may differ by one rounding of each partial sum
                eps, sums = torch.finfo(method.dtype).eps, len(per_rank) - 1
                torch.testing.assert_close(got[name], want, rtol=sums * eps, atol=2**-20 if sums == 1 else sums * eps)
            else:
                torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-6)


def expected_of_scaled(method, gradients, scales, buckets=None):
    """The averages of all steps for loss scales that change, without the scale. gradients: without it, too.

    States follow the loss scale, so gradients without a scale give the same. A method that keeps no tensors may round
    or clamp at fixed magnitudes: it gets the gradients as scaled.
    """
    reference, averages, keeps = Expected(method), [], False
    for i, of_step in enumerate(gradients):
        averages.append(reference.average(of_step, buckets and buckets[i]))
        compressors = [compressor for group in reference.groups.values() for compressor in group.compressors]
        states = [fields for c in compressors for part in c.parts for fields in part.memory.by_parameter().values()]
        keeps |= any(isinstance(value, (torch.Tensor, list)) for fields in states for value in fields.values())
    if keeps:
        return averages
    scaled = [
        {name: [g * scale for g in grads] for name, grads in of_step.items()}
        for scale, of_step in zip(scales, gradients, strict=True)
    ]
    averages = Expected(method).averages(scaled, buckets)
    return [{name: a / scale for name, a in of_step.items()} for scale, of_step in zip(scales, averages)]


def assert_equal_states(a, b):
    """Assert that two state dicts are equal to the bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_equal_states(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
