"""tests/fuzz.py: a short run over all decoders, and that it finds what it looks for in decoders that are broken."""

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
import sanitized
from fuzz import Case, Corpus, Finding
from gradzip import ops
from gradzip.gather import GatherCompressor
from gradzip.registry import registered
from gradzip.state import Key

needs_sanitizers = pytest.mark.skipif(sanitized.why_not() is not None, reason=str(sanitized.why_not()))


def test_every_decoder_is_fuzzed():
    gathering = {method for method in registered().values() if issubclass(method, GatherCompressor)}
    assert {type(gradzip.parse(spec)) for spec in fuzz.SPECS} == gathering


def test_cases_can_be_had_again():
    first, again = (fuzz.make_case(Corpus(), 7, 12, fuzz.SPECS) for _ in range(2))
    assert first == again == Case.from_bytes(first.to_bytes() + b"what the slot held before")


@pytest.mark.slow
@needs_sanitizers
def test_any_payload_is_decoded_or_refused_in_time_and_memory(tmp_path):
    """The same payloads in every run; `make fuzz` tries others, for longer."""
    status, said = fuzz.fuzz(sanitized.build(), tmp_path, "--seed", "0", "--trials", "1500", "--seconds", "12")
    assert status == 0, said[-6000:]
    tried, _, decoded, _, refused, *_ = said.splitlines()[-1].partition(": ")[2].split()
    assert int(decoded) > int(tried) / 10 and int(refused) > int(tried) / 10 and int(tried) > 50


@pytest.mark.slow
@needs_sanitizers
def test_a_decoder_that_reads_past_the_end_is_caught(tmp_path):
    """A copy that takes eight bytes from a bit stream wherever it is."""
    sanitized.build()  # its objects save compiling the rest
    guard = "const int64_t byte = bit / 8, left = nbytes - byte;"
    sanitized.broken(tmp_path / "tree", "csrc/cpu/bit_stream.h", guard, guard.replace("nbytes - byte", "8"))
    place = sanitized.build(tmp_path / "tree")
    status, said = fuzz.fuzz(place, tmp_path, "--seed", "0", "--seconds", "60", "--method", "qsgd")
    assert status != 0 and "ERROR: AddressSanitizer" in said, said[-6000:]
    # The payload is kept; it is caught again in the broken copy, and harmless in the sound one.
    (kept,) = tmp_path.glob("finding-*")
    assert f"seed 0, trial {Case.from_bytes(kept.read_bytes()).trial};" in said and str(kept) in said
    status, said = fuzz.fuzz(place, tmp_path, str(kept))
    assert status != 0 and "ERROR: AddressSanitizer" in said
    status, said = fuzz.fuzz(sanitized.build(), tmp_path, str(kept))
    assert status == 0 and said.splitlines()[-1].startswith("qsgd, shape ")


@dataclasses.dataclass
class Trusting(gradzip.SignSGD):
    """Decodes as SignSGD does, after something that no decoder should do with what a payload claims."""

    majority: bool = False
    does: str = ""

    def decode_add(self, payload, out, weight):
        scale, coins = struct.unpack("<f4xQ", payload.fields)
        if self.does == "trips":
            int(scale)  # of an infinity or NaN there is none
        elif self.does == "allocates":
            torch.empty(coins % 2**20, dtype=torch.uint8)
        elif self.does == "differs":
            out += torch.get_num_threads()
        elif self.does == "hangs" and scale > 100:
            time.sleep(100)
        super().decode_add(payload, out, weight)


@pytest.mark.parametrize(
    "does, message",
    [
        ("trips", "(OverflowError|ValueError): cannot convert float .*, expected a PayloadError or a gradient"),
        ("allocates", "allocated [0-9]* bytes for [0-9]* elements, expected at most"),
        ("differs", "with other instructions or threads"),
    ],
)
def test_what_no_decoder_should_do_is_found(does, message):
    def tries(codec):
        corpus = Corpus(lambda spec: codec)
        for trial in range(300):
            fuzz.check(corpus, fuzz.make_case(corpus, 0, trial, ["a method"]))

    tries(Trusting())
    with pytest.raises(Finding, match=message):
        tries(Trusting(does=does))


def test_a_decoder_that_hangs_is_ended(tmp_path):
    script = (
        "import fuzz, test_fuzz\n"
        f"slot = fuzz.Path({str(tmp_path / 'slot')!r})\n"
        # Once everything is loaded, three seconds are long.
        "fuzz.work(fuzz.Corpus(lambda spec: test_fuzz.Trusting()), slot, 0, 200, 10, ['a method'])\n"
        "fuzz.DECODE_SECONDS = 3\n"
        "corpus = fuzz.Corpus(lambda spec: test_fuzz.Trusting(does='hangs'))\n"
        "fuzz.work(corpus, slot, 0, 200, None, ['a method'])\n"
    )
    folder, root = Path(__file__).parent, sanitized.ROOT
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (root, folder)))}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 1 and "Timeout (0:00:03)" in run.stderr and "in decode_add" in run.stderr, run.stderr
    case = Case.from_bytes((tmp_path / "slot").read_bytes())
    assert struct.unpack_from("<f", case.payload, 32)[0] > 100  # the one that it hangs on


# --- what is refused before there is memory or time for it


def sealed(codec, numel, section_nbytes, fields, number=None):
    payload = ops.new_payload(section_nbytes)
    payload[ops.HEADER_NBYTES :] = 0
    return codec.seal(payload, numel, True, fields, number).numpy().tobytes()


NUMBER = ops.RangeFloat(2, 1, -1.0, 1.0)
EXCESSIVE = {
    # spec, bytes of sections, fields of the method: payloads whose sections have the lengths that they should
    "values of two bits": ("topk:bits=2", 2048 + 12, struct.pack("<Q", 8192), NUMBER),
    "values without bytes": ("topk", 64, struct.pack("<Q8x", 2**62), None),
    "DGC's values": ("dgc", 4 * 5000 + 12, struct.pack("<Q8x", 5000), None),
    "drawn atoms": ("atomo:atoms=entry", 2048, struct.pack("<fII4x", 1.0, 0, 8 * 2036), None),
    "certain atoms": ("atomo:atoms=entry", 4 * 5000 + 12, struct.pack("<fII4x", 1.0, 5000, 0), None),
    "singular values": ("atomo", 4 * 40 * 70, struct.pack("<QQ", 30, 40), None),
}


@pytest.mark.parametrize("name", EXCESSIVE)
def test_more_than_a_gradient_has_is_refused(name):
    spec, nbytes, fields, number = EXCESSIVE[name]
    shape = (30, 40)
    case = Case(spec, shape, 0, 0, sealed(gradzip.parse(spec), 1200, nbytes, fields, number))
    assert fuzz.check(Corpus(), case) is False
    with pytest.raises(gradzip.PayloadError, match="corrupt payload: it claims .* of"):
        gradzip.parse(spec).decode([torch.frombuffer(bytearray(case.payload), dtype=torch.uint8)], 1200)


@pytest.mark.parametrize("spec", ["topk", "qsgd", "fft-range", "onebit"])
def test_a_payload_of_another_gradient_is_refused_before_anything_of_its_size_is_made(spec):
    codec = gradzip.parse(spec)
    for declared in (0, 1199, 1201, 2**31, 2**40, 2**64 - 1):
        payload = codec.encode(torch.ones(30, 40), Key(0, 0, "weight", 0))
        codec.seal(payload, declared, True, payload.numpy()[32:48].tobytes())
        case = Case(spec, (30, 40), 0, 0, payload.numpy().tobytes())
        assert fuzz.check(Corpus(), case) is False  # which looks at what is allocated
        with pytest.raises(gradzip.PayloadError, match=f"of a tensor of {declared} elements, expected 1200"):
            codec.decode([payload], 1200)
