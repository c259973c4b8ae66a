"""`gradzip.parse`: methods from strings, as on a command line."""

import pytest
import torch

import gradzip
from gradzip.methods.spec import unparse
from kinds import ALL


@pytest.mark.parametrize(
    "spec, compressor",
    [
        ("none", gradzip.NoCompression()),
        ("fp16", gradzip.Cast()),
        ("fp16:dtype=bfloat16", gradzip.Cast(torch.bfloat16)),
        ("fft-range", gradzip.FFTRange()),
        ("fft-range:", gradzip.FFTRange()),
        ("fft-range:theta=0.85,bits=10", gradzip.FFTRange(theta=0.85, bits=10)),
        ("fft-range: block=None, value_range=(-1, 2), rounding=stochastic",
         gradzip.FFTRange(block=None, value_range=(-1, 2), rounding="stochastic")),
        ("dct-range:block=64,bits=8", gradzip.DCTRange(block=64, bits=8)),
        ("fft-range:error_feedback=True,min_numel=0", gradzip.FFTRange(error_feedback=True, min_numel=0)),
        ("topk:error_feedback=false", gradzip.TopK(error_feedback=False)),
        ("powersgd:warm_start=FALSE,error_feedback=true", gradzip.PowerSGD(warm_start=False)),
        ("terngrad:clip=none", gradzip.TernGrad(clip=None)),
    ],
)  # fmt: skip
def test_parse(spec, compressor):
    assert gradzip.parse(spec) == compressor


@pytest.mark.parametrize(
    "spec, message",
    [
        ("zip", "unknown compression method 'zip', expected one of: acpsgd, atomo, auto, block-float, dct-range, dgc"),
        ("", "unknown compression method ''"),
        (
            "fft-range:tetha=0.5",
            "unknown argument 'tetha', expected one of: min_numel, exchange, residual_decay, theta, bits",
        ),
        (
            "top-k",
            "unknown compression method 'top-k', did you mean 'topk'\\? There are: acpsgd, atomo, auto, block-float, d",
        ),
        ("FFTRange", "did you mean 'fft-range'"),
        ("OneBitSGD", "did you mean 'onebit'"),
        ("Cast", "did you mean 'fp16'"),
        (
            "topk(theta=0.9)",
            r"unknown compression method 'topk\(theta=0.9\)', expected arguments after a colon: topk:arg",
        ),
        ("fft-range:0.5", "'fft-range:0.5': expected method:argument=value,argument=value with min_numel, exch"),
        ("fft-range:theta=", "expected method:argument=value"),
        ("fft-range:theta=open('x')", "expected method:argument=value"),
        ("fft-range:**{}", "expected method:argument=value"),
        ("topk:theta=0.9,theta=0.8", "expected method:argument=value"),
        ("fft-range:theta=1.0", r"got theta = 1.0, expected a number in \[0, 1\)"),
        ("fft-range:theta=big", "got theta = 'big'"),
        ("fft-range:bits=17", "got bits = 17, expected an integer from 2 to 16"),
        ("topk:theta=85", "^compression 'topk:theta=85': got theta = 85, expected a number"),
        ("per-layer", "^compression 'per-layer': got no rules, expected per-layer:pattern=method"),
        ("per-layer:fc", "^compression 'per-layer:fc': got the rule 'fc', expected pattern=method or"),
        (
            "per-layer:fc=topkk",
            "^compression 'per-layer:fc=topkk': unknown compression method 'topkk', did you mean 'topk'",
        ),
    ],
)
def test_errors_name_the_mistake(spec, message):
    with pytest.raises(ValueError, match=message) as error:
        gradzip.parse(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", [None, 0.9, gradzip.TopK(), gradzip.TopK])
def test_non_strings_are_refused(spec):
    with pytest.raises(TypeError, match=r"parse: got .*, expected a string such as 'topk:theta=0.99'"):
        gradzip.parse(spec)


@pytest.mark.parametrize("spec", ALL)
def test_unparse_is_the_inverse(spec):
    assert unparse(gradzip.parse(spec)).partition(":")[0] == spec.partition(":")[0]
    assert gradzip.parse(unparse(gradzip.parse(spec))) == gradzip.parse(spec)


@pytest.mark.parametrize(
    "spec",
    ["topk", "topk:theta=0.9,bits=8", "fp16:dtype=bfloat16", "gradiveq:sampling=qsgd(bits=2)",
     "auto:allow=[fp16,dct-range(theta=0.95)],every=50"],
)  # fmt: skip
def test_unparse_writes_what_differs_from_the_defaults(spec):
    assert sorted(unparse(gradzip.parse(spec))) == sorted(spec)


def test_positional_arguments_have_the_documented_order():
    assert gradzip.FFTRange(0.9, 8, 4) == gradzip.FFTRange(theta=0.9, bits=8, mantissa=4)
    assert gradzip.Cast(torch.bfloat16).dtype == torch.bfloat16
