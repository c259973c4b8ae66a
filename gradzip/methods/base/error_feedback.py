"""The arguments of error feedback that all methods with it have alike."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from .compressor import Compressor, is_number


@dataclass
class ErrorFeedback(Compressor):
    """A method that keeps what it did not send, the residual e, and adds it to the next gradient.

    Args:
        residual_decay: beta in (0, 1]. The next gradient g becomes beta e + g. 1 loses nothing. Below 1, old residuals
            fade, which helps where gradients change much between exchanges, as the differences of local steps do. The
            residual of the owner of a partition fades alike. State dicts hold beta e.

    Source: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025, Algorithm 1, with beta = 0.95.
    """

    _: KW_ONLY
    residual_decay: float = field(default=1.0, metadata={"digest": "if changed"})

    @property
    def reads_half(self) -> bool:  # type: ignore[override]
        return not self.error_feedback  # what is compressed becomes the residual, float32

    def __post_init__(self) -> None:
        super().__post_init__()
        decay = self.residual_decay
        self.check("residual_decay", is_number(decay) and 0 < decay <= 1, "a number in (0, 1]")
        if decay != 1 and not self.error_feedback:
            raise ValueError(
                f"{type(self).__name__}: got residual_decay = {decay!r} and error_feedback = False, expected "
                "error_feedback = True: there is no residual"
            )
