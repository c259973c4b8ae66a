"""The methods. Each file registers its own; what `__all__` names here is public in `gradzip`."""

from .atomo import ATOMO
from .block_float import BlockFloat
from .cast import Cast
from .dct import DCTRange
from .dgc import DGC
from .fft import FFTRange
from .gradiveq import GradiVeQ
from .hierarchical import Hierarchical
from .low_rank import ACPSGD, PowerSGD
from .none import NoCompression
from .per_layer import PerLayer
from .phases import Phases
from .quantize import QSGD, TernGrad
from .randomk import RandomK
from .signs import OneBitSGD, SignSGD
from .topk import TopK

__all__ = [
    "ACPSGD",
    "ATOMO",
    "DGC",
    "QSGD",
    "BlockFloat",
    "Cast",
    "DCTRange",
    "FFTRange",
    "GradiVeQ",
    "Hierarchical",
    "NoCompression",
    "OneBitSGD",
    "PerLayer",
    "Phases",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "TopK",
]
