"""Count the instructions of the CUDA kernels, as a GPU executes them (SASS of sm_90). Needs no GPU.

A kernel has all instructions that ptxas wrote for it, without padding. A loop has those of all its blocks, whether a
trip takes them or not, without those of loops inside it. It does not have those of functions that are called and not
inlined (divisions of subnormal numbers), nor those for lanes that have diverged at a warp collective.

Instructions an item need a statement (WORK): how many items, as elements, a thread handles in a trip of an outermost
loop, and how often each loop inside runs in that trip. They are the sum of the loops' instructions times their trips,
divided by the items. What is before and behind the loops does not count, unless there is none.

The objects are those of the CUDA build, if it is up to date, or compiled with its flags. cuobjdump and nvdisasm are
found on PATH, or in the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import kernel_resources
import simt_build
from benchmarks.common.arguments import Parser
from benchmarks.common.results import Blocks, replace_blocks
from benchmarks.common.tables import markdown
from paths import ROOT

EXAMPLES = """\
examples:
  python -m benchmarks.sass                                     the kernels that have a statement
  python -m benchmarks.sass select compact                      all kernels of csrc/cuda/select.cu and compact.cu
  python -m benchmarks.sass chunk_topk --only topk_k --loops    each loop: trips, instructions, the most frequent ones
  python -m benchmarks.sass -I DIR DIR/prototype.cu             kernels that are not gradzip's
  python -m benchmarks.sass --write                             record the counts, and write the table of docs/gpu.md
"""
INSTALL = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, or put those of a CUDA toolkit on PATH"
ARCH = "sm_90"
PAGE = ROOT / "docs" / "gpu.md"
START = "<!-- table of instructions: python -m benchmarks.sass --write -->\n\n"


class Work(NamedTuple):
    """What a thread does in a trip of an outermost loop.

    items: how many elements, bits, ... (`what`) it handles. trips: how often each loop runs in a trip of the loop
    around it, by the number that --loops prints; loops that are not named run once. skips: an opcode. Blocks that have
    it are not counted.
    """

    items: float
    what: str
    trips: Mapping[int, float] = {}
    skips: str = ""


# By source, as kernels of other sources need not be compiled.
WORK: Mapping[str, Mapping[str, Work]] = {
    # A bitmap with 15 % of the bits set, as that of FFTRange: two low bits. Of the words of a segment, the one with
    # most has 10 set bits, of those of its stream 10 codes (means of random ones). Codes are found in two rounds, of
    # the four in a trip.
    "bitmap_code": {
        "bitmap_plan_kernel": Work(32, "bit", {2: 2, 3: 2, 4: 3}),
        "bitmap_write_kernel": Work(32, "bit", {2: 2, 3: 3, 4: 10}),
        "bitmap_read_kernel": Work(32, "bit", {3: 10, 5: 10}),
    },
    # 61 of 4096 random elements: 70 candidates, of which a thread compares one with all, 16 in a trip. The thread of a
    # warp with most has two of the elements. Not counted: the search where more than 256 candidates are left.
    "chunk_topk": {
        "chunk_topk_kernel<float>": Work(16, "element", {2: 2, 3: 0, 4: 4, 5: 2, 7: 2, 8: 2}),
    },
    # A thread has a row of 64 elements in each trip. 15 % of the coefficients are sent: a word of codes in 2.4 trips;
    # 20 % are candidates. Not counted: loops of partial tiles, and of streams that end within a word; and the
    # loads of 16-bit floats, four at a time, in place of those of float32.
    "transform": {
        "transform_rank_kernel<RowTile<FourierRow<64> > >": Work(
            64, "element", dict.fromkeys([1, 2, *range(4, 13)], 0), skips="LDG.E.64.CONSTANT"
        ),
        "transform_collect_kernel<RowTile<FourierRow<64> > >": Work(
            64, "element", dict.fromkeys([1, 2, *range(4, 10), *range(11, 15)], 0), skips="LDG.E.64.CONSTANT"
        ),
        "transform_decode_kernel<RowTile<FourierRow<64> > >": Work(
            64, "element", dict.fromkeys([1, 4, 5, 8, 9, 10, 11], 0) | {7: 2.4}
        ),
        "transform_emit_kernel": Work(64, "element", dict.fromkeys([3, 4, 8, 9], 0) | {2: 6.4, 5: 6.4, 7: 12}),
    },
}


class SassError(Exception):
    """Instructions cannot be counted. The message is one line."""


class Instruction(NamedTuple):
    address: int
    predicate: str  # as @!P0; or empty
    opcode: str  # with its modifiers
    operands: str

    @property
    def target(self) -> int | None:
        """The address that it branches to."""
        found = re.search(r"0x[0-9a-f]+$", self.operands) if self.opcode.startswith("BRA") else None
        return int(found[0], 16) if found else None

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        ends = self.opcode.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMP", "JMX", "KILL")
        return not ends or bool(self.predicate) or "," in self.operands


@dataclass
class Loop:
    """A natural loop: what is between a jump to a block that dominates it and that block."""

    number: int  # from 1, in the order of headers
    header: int
    addresses: frozenset[int]  # with loops inside
    parent: Loop | None = None
    own: list[Instruction] = field(default_factory=list)  # without loops inside

    @property
    def depth(self) -> int:
        return self.parent.depth + 1 if self.parent else 0

    def trips(self, work: Work) -> float:
        """How often it runs in a trip of the outermost loop around it."""
        return work.trips.get(self.number, 1) * (self.parent.trips(work) if self.parent else 1)


Kernels = dict[str, list[Instruction]]
LINE = re.compile(
    r"^\t\tFunction : (?P<name>\w+)$|^ +/\*(?P<address>[0-9a-f]{4,})\*/ +(?P<text>[^;]+?) *;", re.MULTILINE
)
TEXT = re.compile(r"(@!?\w+)? *(\S+) ?(.*)")


def parse(disassembly: str) -> Kernels:
    """Return the instructions of each kernel, by mangled name, from the output of `cuobjdump -sass`."""
    found: Kernels = {}
    code: list[Instruction] = []
    for line in LINE.finditer(disassembly):
        if line["name"]:
            code = found.setdefault(line["name"], [])
        elif text := TEXT.fullmatch(line["text"]):
            code.append(Instruction(int(line["address"], 16), text[1] or "", text[2], text[3]))
    for code in found.values():
        while code and (code[-1].opcode == "NOP" or code[-1].target == code[-1].address):
            code.pop()
    return found


def loops(code: list[Instruction], skips: str = "") -> list[Loop]:
    """Return the loops. skips: an opcode. A loop's own instructions are those of blocks that do not have it."""
    place = {each.address: i for i, each in enumerate(code)}
    # Lanes that have diverged leave at BRA.DIV, one by one, and come back.
    jumps = {i: place[each.target] for i, each in enumerate(code) if each.target in place and each.opcode != "BRA.DIV"}
    cuts = (i + 1 for i, each in enumerate(code) if i in jumps or not each.goes_on)
    starts = sorted({0, *jumps.values(), *cuts} - {len(code)})
    block_at = {start: block for block, start in enumerate(starts)}
    ends = [*starts[1:], len(code)]
    after = []
    for end in ends:
        targets = [jumps[end - 1]] if end - 1 in jumps else []
        targets += [end] if code[end - 1].goes_on and end < len(code) else []
        after.append([block_at[target] for target in targets])
    before = reachable_before(after)
    dominators = find_dominators(before)
    bodies: dict[int, set[int]] = {}
    for header, sources in before.items():
        for source in sources:
            if header in dominators[source]:
                body, left = bodies.setdefault(header, {header}), [source]
                while left:
                    if (block := left.pop()) not in body:
                        body.add(block)
                        left += before[block]
    found = []
    for number, header in enumerate(sorted(bodies), 1):
        inside = (code[i].address for block in bodies[header] for i in range(starts[block], ends[block]))
        found.append(Loop(number, code[starts[header]].address, frozenset(inside)))

    def innermost(around: list[Loop]) -> Loop | None:
        return min(around, key=lambda loop: len(loop.addresses), default=None)

    for loop in found:
        loop.parent = innermost([other for other in found if loop.addresses < other.addresses])
    for block in (code[start:end] for start, end in zip(starts, ends)):
        if loop_of := innermost([loop for loop in found if block[0].address in loop.addresses]):
            loop_of.own += [] if skips and any(each.opcode == skips for each in block) else block
    return found


def reachable_before(after: list[list[int]]) -> dict[int, list[int]]:
    """Return the blocks that come before each block that block 0 leads to, which is the first."""
    before: dict[int, list[int]] = {0: []}
    left = [0]
    while left:
        block = left.pop()
        for to in after[block]:
            if to not in before:
                before[to] = []
                left.append(to)
            before[to].append(block)
    return before


def find_dominators(before: dict[int, list[int]]) -> dict[int, set[int]]:
    """Return the blocks that each path from block 0 to a block passes."""
    found = {block: set(before) for block in before} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for block in list(before)[1:]:
            now = set.intersection(*(found[other] for other in before[block])) | {block}
            changed |= now != found[block]
            found[block] = now
    return found


def per_item(code: list[Instruction], work: Work) -> float:
    """Return the instructions for each item, rounded up to a tenth."""
    found = loops(code, work.skips)
    total = sum(loop.trips(work) * len(loop.own) for loop in found) if found else len(code)
    return math.ceil(10 * total / work.items) / 10


def find_tool(name: str) -> str:
    """Return the path of cuobjdump or nvdisasm. Raises SassError, which says what to install."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    packages = [str(path) for folder in folders for path in Path(folder).glob("*/bin")]
    if found := shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *packages])):
        return found
    raise SassError(f"no {name}; {INSTALL}")


def disassemble(file: Path) -> Kernels:
    """Return the instructions of each kernel of an object. Raises SassError."""
    tool, called = find_tool("cuobjdump"), find_tool("nvdisasm")
    path = os.pathsep.join([str(Path(called).parent), os.environ.get("PATH", "")])
    command = [tool, "-sass", "-arch", ARCH, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
    if done.returncode:
        raise SassError(f"{tool} {file.name}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    found = parse(done.stdout)
    return dict(zip(kernel_resources.readable(list(found)), found.values()))


def find_nvcc() -> str:
    """Return the path of nvcc. Raises SassError."""
    if found := simt_build.setup_py()["find_nvcc"]():
        return found
    raise SassError("no nvcc to compile with; install the CUDA toolkit, or set CUDA_HOME")


def nvcc_release() -> str:
    """Return the version of nvcc, as in `13.0`. Raises SassError."""
    line = simt_build.setup_py()["version"]([find_nvcc()])
    return kernel_resources.release_of(line)


def parts(source: Path, include: list[str]) -> simt_build.Parts:
    """What decides about the instructions of a source. Raises SassError."""
    used = simt_build.sources(simt_build.CSRC / "cuda", simt_build.CSRC / "common")
    used += [path for folder in include for path in sorted(Path(folder).glob("*.*h"))]
    return [ARCH, *include, ROOT / "setup.py", nvcc_release(), source, *used]


def object_of(source: Path, include: list[str]) -> Path:
    """Return a source's object: of the CUDA build, if it is up to date and for sm_90, or compiled now.

    Raises SassError.
    """
    built, ninja_file = kernel_resources.FOLDER / f"csrc/cuda/{source.name}.o", kernel_resources.FOLDER / "build.ninja"
    ours = source.parent == simt_build.CSRC / "cuda" and kernel_resources.is_built(built)
    if ours and f"arch={ARCH.replace('sm', 'compute')}," in ninja_file.read_text():
        return built
    setup, nvcc = simt_build.setup_py(), find_nvcc()
    flags = " ".join(f"-I{Path(folder).resolve()}" for folder in include)
    settings = {"GRADZIP_CUDA_ARCHS": ARCH.removeprefix("sm_"), "NVCC_APPEND_FLAGS": flags}

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, settings):
            ninja, made = Path(folder) / "build.ninja", f"{folder}/{source}.o"
            ninja.write_text(setup["ninja_file"](Path(folder), [str(source)], nvcc, ""))
            command = [setup["find_ninja"](), "--quiet", "-f", str(ninja), made]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                lines = [line for line in done.stdout.splitlines() if "error" in line] or [done.stdout]
                raise SassError(f"nvcc {source.name}: {lines[0]}")
            shutil.copy(made, target)

    return simt_build.cached(f"{source.name}.o", parts(source, include), make)


def count(stem: str) -> dict[str, tuple[int, float]]:
    """Return the instructions of each kernel of csrc/cuda/STEM.cu in WORK: in all, and an item. Raises SassError."""
    kernels = disassemble(object_of(simt_build.CSRC / "cuda" / f"{stem}.cu", []))
    if missing := WORK[stem].keys() - kernels.keys():
        raise SassError(f"csrc/cuda/{stem}.cu: got no kernel {min(missing)}, expected those of benchmarks/sass.py")
    return {name: (len(kernels[name]), per_item(kernels[name], work)) for name, work in WORK[stem].items()}


def blocks() -> Blocks:
    """Return the block of docs/gpu.md."""
    recorded = kernel_resources.load_instructions()
    table = [
        [f"`{name}`", str(recorded[name].kernel), f"{recorded[name].item:.1f}", work.what]
        for kernels in WORK.values()
        for name, work in kernels.items()
    ]
    header = ["kernel", "instructions", "for each", "item"]
    return {(PAGE, START): "".join(f"{line}\n" for line in markdown(header, table))}


def rows(kernels: Kernels, work: Mapping[str, Work]) -> Iterator[list[str]]:
    for name, code in kernels.items():
        known = work.get(name)
        inside = [len(loop.addresses) for loop in loops(code) if not loop.parent]
        yield [f"`{name}`", str(len(code)), " + ".join(map(str, inside)), *(
            [f"{per_item(code, known):.1f}", known.what] if known else ["", ""])]  # fmt: skip


def loop_rows(code: list[Instruction], work: Work) -> Iterator[list[str]]:
    for loop in loops(code, work.skips):
        opcodes = Counter(each.opcode.split(".")[0] for each in loop.own).most_common(6)
        names = " ".join(f"{name} {count}" for name, count in opcodes)
        yield [f"{'· ' * loop.depth}{loop.number}", names, f"{loop.header:#x}", str(len(loop.own)),
               f"{loop.trips(work):g}", f"{loop.trips(work) * len(loop.own) / work.items:.1f}"]  # fmt: skip


def source_of(text: str) -> Path:
    path = Path(text) if text.endswith(".cu") else simt_build.CSRC / "cuda" / f"{text}.cu"
    if not path.is_file():
        raise SassError(f"got {text!r}, expected the path of a .cu file, or the name of one in csrc/cuda")
    return path.resolve()


def main() -> None:
    parser = Parser("sass", __doc__, EXAMPLES)
    parser.add_argument("sources", metavar="SOURCE", nargs="*", help="files, or names in csrc/cuda (default: WORK)")
    parser.add_argument("--only", metavar="REGEX", type=re.compile, default="", help="kernels whose names have this")
    parser.add_argument("--loops", action="store_true", help="print the loops of each kernel")
    parser.add_argument("-I", metavar="DIR", dest="include", action="append", default=[], help="find headers there")
    parser.add_argument(
        "--write", action="store_true", help="record the counts in kernel_resources.json, and in docs/gpu.md"
    )
    args = parser.parse_args()
    try:
        if args.write:
            kernel_resources.store(instructions={name: row for stem in WORK for name, row in count(stem).items()})
            replace_blocks(blocks())
            return
        table: list[list[str]] = []
        for text in args.sources or WORK:
            source = source_of(text)
            work = WORK.get(source.stem, {})
            kernels = disassemble(object_of(source, args.include))
            chosen = {name: code for name, code in kernels.items() if re.search(args.only, name)
                      and (args.sources or name in work)}  # fmt: skip
            if args.loops:
                for name, code in chosen.items():
                    known = work.get(name, Work(1, "trip"))
                    print(f"`{name}`, {len(code)} instructions, {per_item(code, known):.1f} for each {known.what}:\n")
                    header = [
                        "loop",
                        "most of its instructions",
                        "at",
                        "instructions",
                        "trips",
                        f"for each {known.what}",
                    ]
                    print(*markdown(header, loop_rows(code, known), 2), sep="\n", end="\n\n")
            table += rows(chosen, work)
        if not args.loops:
            print(*markdown(["kernel", "instructions", "in outermost loops", "for each", "item"], table), sep="\n")
    except (SassError, RuntimeError) as reason:
        parser.fail(str(reason))


if __name__ == "__main__":
    main()
