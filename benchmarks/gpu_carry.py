"""Makes what a machine with a GPU and without a network needs for `benchmarks.gpu_lease`.

  python -m benchmarks.gpu_carry OUT --cuda             # an H100 or H200: --chip 90
  python -m benchmarks.gpu_carry OUT --chip 80          # an A100 that has CUDA's libraries
  python -m benchmarks.gpu_carry OUT --python 3.12      # for another Python than this one

OUT gets parts of one archive under zstd, and there, with a Python of that version:

  cat part-* | zstd -d | tar -x && cd project
  PYTHONPATH=../packages python -m benchmarks.gpu_lease ../seen

The archive has the project as git knows it, and the packages that it and its tests need, in the
versions that are installed here, from the network. The code for other chips in the libraries is
zeros, and TensorFlow's headers are left out, except those that the stand-in of
tests/support/fake_gpu is built with.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.metadata
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("pytest", "pytest-xdist", "pytest-timeout")
FATBIN, SASS = 0xBA55ED50, 2
"""The mark of a group of GPU code, and the kind of an entry that is for one chip alone."""
LEFT_OUT = re.compile(r"\.pyc$|tensorflow/include/(?!xla/tsl/cuda/|third_party/gpus/)")


def requirements() -> list[Requirement]:
  """Returns what the project and its tests ask for."""
  config = configparser.ConfigParser()
  config.read(ROOT / "setup.cfg")
  lines = config["options"]["install_requires"].splitlines()
  asked = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
  return [*map(Requirement, (*asked, *TESTS))]


def closure(asked: Sequence[Requirement]) -> list[str]:
  """Returns what they need, "name==version" as it is installed here."""
  found: dict[str, importlib.metadata.Distribution] = {}
  todo = [*asked]
  while todo:
    name = todo.pop().name
    if name in found:
      continue
    found[name] = made = importlib.metadata.distribution(name)
    needed = map(Requirement, made.requires or ())
    todo += [one for one in needed if not one.marker or one.marker.evaluate({"extra": ""})]
  return [f"{name}=={one.version}" for name, one in found.items()]


def cuda_packages() -> list[str]:
  """Returns what the extra `gpu` adds: requirements of TensorFlow's own."""
  needed = map(Requirement, importlib.metadata.requires("tensorflow") or ())
  return [f"{n.name}{n.specifier}" for n in needed if n.marker and "and-cuda" in str(n.marker)]


def install(packages: Sequence[str], python: str, folder: Path) -> None:
  """Installs packages, without what they ask for, for a Python of Linux on x86_64."""
  command = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", folder]
  command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
  subprocess.run([*command, *packages], check=True)
  for file in folder.rglob("*"):
    if file.is_file() and LEFT_OUT.search(str(file)):
      file.unlink()


def trim(library: Path, chip: int) -> int:
  """Zeros the code of a library that is for other chips; returns how many bytes."""
  said = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True)
  section = re.search(r"\.nv_fatbin\s+PROGBITS\s+\w+ (\w+) (\w+)", said.stdout)
  if section is None:
    return 0
  begin, size = (int(number, 16) for number in section.groups())
  data, zeroed = bytearray(library.read_bytes()), 0
  for at, length in code_of_others(data, begin, begin + size, chip):
    data[at : at + length] = bytes(length)
    zeroed += length
  library.write_bytes(data)
  return zeroed


def code_of_others(
  data: bytes | bytearray, at: int, end: int, chip: int
) -> Iterator[tuple[int, int]]:
  """Yields the place and the length of each piece of code that is for another chip.

  A group has a header of 16 bytes: the mark, a version, the header's length, and that of the
  entries. An entry's header begins with its kind and the lengths of header and code; the chip, as
  90 of sm_90, stands at byte 28.
  """
  while at + 16 <= end:
    mark, _, header, length = struct.unpack_from("<IHHQ", data, at)
    if mark != FATBIN:
      at += 8
      continue
    entry, at = at + header, at + header + length
    while entry < at:
      kind, _, own, code = struct.unpack_from("<HHIQ", data, entry)
      (of,) = struct.unpack_from("<I", data, entry + 28)
      if kind == SASS and of != chip:
        yield entry + own, code
      entry += own + code


def pack(folder: Path, out: Path, part_mib: int) -> list[int]:
  """Writes the archive in parts; returns their sizes in bytes."""
  tar = subprocess.Popen(["tar", "-C", folder, "-c", "project", "packages"], stdout=subprocess.PIPE)
  small = subprocess.Popen(["zstd", "-9", "-T0", "-q"], stdin=tar.stdout, stdout=subprocess.PIPE)
  split = ["split", "-b", f"{part_mib}M", "-d", "-a", "3", "-", out / "part-"]
  subprocess.run(split, stdin=small.stdout, check=True)
  if tar.wait() or small.wait():
    raise SystemExit("tar or zstd failed")
  return [path.stat().st_size for path in sorted(out.glob("part-*"))]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("out", type=Path)
  parser.add_argument("--chip", type=int, default=90, help="90 for sm_90")
  parser.add_argument("--cuda", action="store_true", help="with CUDA's libraries")
  parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]))
  parser.add_argument("--part_mib", type=int, default=60)
  given = parser.parse_args()
  given.out.mkdir(parents=True, exist_ok=True)
  folder = given.out / "unpacked"
  packages, project = folder / "packages", folder / "project"
  cuda = cuda_packages() if given.cuda else []
  install([*closure(requirements()), *cuda], given.python, packages)
  libraries = [*packages.glob("tensorflow/*.so.2"), *packages.glob("nvidia/*/lib/*.so*")]
  for library in libraries:
    if zeroed := trim(library, given.chip):
      mib = library.stat().st_size / 2**20
      print(
        f"{library.name}: {zeroed / 2**20:.0f} of {mib:.0f} MiB are for other chips", flush=True
      )
  listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
  for name in filter(None, listed.stdout.decode().split("\0")):
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, project / name, follow_symlinks=False)
  sizes = pack(folder, given.out, given.part_mib)
  print(f"{len(sizes)} parts, {sum(sizes) / 2**20:.0f} MiB, in {given.out}")


if __name__ == "__main__":
  main()
