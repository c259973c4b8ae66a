"""tests/support/fuzz.py finds faults in broken decoders. tests/ops/test_sanitized.py runs it over all decoders."""

import dataclasses
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fuzz
import gradzip
import kinds
from fuzz import Case, Corpus, Finding
from gradzip import ops
from gradzip.memory.state import Key
from gradzip.methods.base.gather import GatherCompressor
from paths import ROOT
from single import decode, encode


def test_every_decoder_is_fuzzed():
    assert {*kinds.examples(lambda compressor: isinstance(compressor, GatherCompressor))} <= {*fuzz.SPECS}


def test_cases_are_reproducible():
    first, second = (fuzz.generate_case(Corpus(), 7, 12, fuzz.SPECS) for _ in range(2))
    assert first == second == Case.from_bytes(first.to_bytes() + b"what the slot held before")


@dataclasses.dataclass
class Trusting(gradzip.SignSGD):
    """SignSGD with a fault in its decoder, triggered by the fields of a payload."""

    majority: bool = False
    fault: str = ""

    def sum_all(self, sums):
        for payload in (payload for coded in sums for payload in coded.payloads if payload.body.numel() >= 4):
            scale = float(payload.body[:4].view(torch.float32))
            (coins,) = struct.unpack("<Q8x", payload.fields)
            if self.fault == "trips":
                int(scale)  # raises for inf and NaN
            elif self.fault == "allocates":
                torch.empty(coins % 2**20, dtype=torch.uint8)
            elif self.fault == "hangs" and scale > 100:
                time.sleep(100)
        weight = torch.get_num_threads()
        super().sum_all([coded._replace(weight=weight) if self.fault == "differs" else coded for coded in sums])


@pytest.mark.parametrize(
    "fault, message",
    [
        ("trips", "(OverflowError|ValueError): cannot convert float .*, expected a PayloadError or a gradient"),
        ("allocates", "allocated [0-9]* bytes for [0-9]* elements, expected at most"),
        ("differs", "with other instructions or threads"),
    ],
)
def test_faulty_decoders_are_found(fault, message):
    def run_trials(codec):
        corpus = Corpus(lambda spec: codec)
        for trial in range(300):
            fuzz.check(corpus, fuzz.generate_case(corpus, 0, trial, ["a method"]))

    run_trials(Trusting())
    with pytest.raises(Finding, match=message):
        run_trials(Trusting(fault=fault))


def test_decoder_that_hangs_is_ended(tmp_path):
    script = (
        "import fuzz, test_fuzz\n"
        f"slot = fuzz.Path({str(tmp_path / 'slot')!r})\n"
        # Loads everything, so that three seconds are enough afterwards.
        "fuzz.run_cases(fuzz.Corpus(lambda spec: test_fuzz.Trusting()), slot, 0, 200, 10, ['a method'])\n"
        "fuzz.DECODE_SECONDS = 3\n"
        "corpus = fuzz.Corpus(lambda spec: test_fuzz.Trusting(fault='hangs'))\n"
        "fuzz.run_cases(corpus, slot, 0, 200, None, ['a method'])\n"
    )
    folders = (ROOT, ROOT / "tests" / "support", Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 1 and "Timeout (0:00:03)" in run.stderr and "in sum_all" in run.stderr, run.stderr
    case = Case.from_bytes((tmp_path / "slot").read_bytes())
    assert struct.unpack_from("<f", case.payload, 48)[0] > 100  # the decoder hangs on this case


# --- payloads that must be refused before memory is allocated


def sealed_payload(codec, numel, section_nbytes, fields, number=None):
    payload = ops.new_payload(section_nbytes)
    payload[ops.HEADER_NBYTES :] = 0
    return codec.seal(ops.Seal(payload, numel, fields, number=number)).numpy().tobytes()


NUMBER = ops.RangeFloat(2, 1, -1.0, 1.0)
OVERSIZED = {
    # spec, bytes of sections, fields of the method, number format. The sections have the lengths that the fields imply.
    "values of two bits": ("topk:bits=2", 2048 + 12, struct.pack("<Q", 8192), NUMBER),
    "values without bytes": ("topk", 64, struct.pack("<Q8x", 2**62), None),
    "coefficients": ("dct-range:bits=2", 4000, struct.pack("<I4B", 8192, 0, 0, 0, 0), NUMBER),
    "DGC's values": ("dgc", 4 * 5000 + 12, struct.pack("<Q8x", 5000), None),
    "drawn atoms": ("atomo:atoms=entry", 2048, struct.pack("<fII4x", 1.0, 0, 8 * 2036), None),
    "certain atoms": ("atomo:atoms=entry", 4 * 5000 + 12, struct.pack("<fII4x", 1.0, 5000, 0), None),
    "singular values": ("atomo", 4 * 40 * 70, struct.pack("<QQ", 30, 40), None),
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_oversized_payloads_are_refused(name):
    spec, nbytes, fields, number = OVERSIZED[name]
    shape = (30, 40)
    case = Case(spec, shape, 0, 0, sealed_payload(gradzip.parse(spec), 1200, nbytes, fields, number))
    assert fuzz.check(Corpus(), case) is False
    with pytest.raises(gradzip.PayloadError, match="corrupt payload: it claims .* of"):
        decode(gradzip.parse(spec), [torch.frombuffer(bytearray(case.payload), dtype=torch.uint8)], shape)


@pytest.mark.parametrize("spec", kinds.examples(lambda compressor: isinstance(compressor, GatherCompressor)))
def test_payload_of_another_gradient_is_refused_before_allocating(spec):
    codec = gradzip.parse(spec)
    for declared in (0, 1199, 1201, 2**31, 2**40, 2**64 - 1):
        payload = encode(codec, torch.ones(30, 40), Key(0, 0, "weight", 0))
        codec.seal(ops.Seal(payload, declared, payload.numpy()[32:48].tobytes()))
        case = Case(spec, (30, 40), 0, 0, payload.numpy().tobytes())
        assert fuzz.check(Corpus(), case) is False  # also checks allocations
        with pytest.raises(gradzip.PayloadError, match=f"of a tensor of {declared} elements, expected 1200"):
            decode(codec, [payload], (30, 40))
