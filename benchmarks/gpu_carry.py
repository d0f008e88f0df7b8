"""Makes what a machine with a GPU and without a network needs for `benchmarks.gpu_lease`.

  python -m benchmarks.gpu_carry OUT                    # an H100 or H200: --chip 90
  python -m benchmarks.gpu_carry OUT --python 3.12      # for another Python than this one

OUT gets archives in parts, zstd with its libraries, and the command that starts it all there, once
parts and command lie in one folder of that machine:

  sh start.sh                # unpacks A, B and C, makes a virtual environment, begins the lease
  tail -f /tmp/seen/lease.txt  # or $TO/seen, if TO names another folder than /tmp

A has the project as git knows it and the packages that it and its tests need, in the versions that
are installed here; B those of CUDA's libraries that TensorFlow calls, and empty ones in the place
of those that it only opens; C has NCCL. The code for other chips in the libraries is zeros, and
TensorFlow's headers are left out.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("pytest", "pytest-xdist", "pytest-timeout")
FATBIN, SASS = 0xBA55ED50, 2
"""The mark of a group of GPU code, and the kind of an entry that is for one chip alone."""
LEFT_OUT = re.compile(r"\.pyc$|/tensorflow/include/|/clang/")
CALLED = (
  "cublas/lib/libcublas.so.12", "cublas/lib/libcublasLt.so.12", "cuda_runtime/lib/libcudart.so.12",
  "cuda_cupti/lib/*.so*", "cuda_nvcc/bin/ptxas", "cuda_nvcc/nvvm/libdevice/*",
  "nvjitlink/lib/libnvJitLink.so.12", "cudnn/lib/*.so*", "cuda_nvrtc/lib/libnvrtc.so.12",
  "cuda_nvrtc/lib/libnvrtc-builtins.so*",
)  # fmt: skip
"""Files of CUDA's packages that a run calls."""
OPENED = ("libcufft.so.11", "libcusolver.so.11", "libcusparse.so.12", "libcurand.so.10")
"""Libraries that TensorFlow only opens: without them it takes no GPU."""
START = """set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${TO:-/tmp}
mkdir -p $to/w $to/seen $to/home
for group in A B C; do
  [ ! -e "$here/$group-00" ] || cat "$here"/$group-* |
    LD_LIBRARY_PATH="$here" "$here"/zstd -d --long=27 -q | tar -x -C $to/w
done
python3 -m venv --without-pip $to/v
found=$(echo $to/v/lib/python3.*/site-packages)
printf '%s\\n' $to/w/packages $to/w/project/framework > "$found"/carried.pth
cd $to/w/project
export HOME=$to/home LD_LIBRARY_PATH=/usr/local/nvidia/lib64:$to/w/stubs:${LD_LIBRARY_PATH:-}
export XLA_FLAGS="--xla_gpu_cuda_data_dir=$to/w/packages/nvidia/cuda_nvcc ${XLA_FLAGS:-}"
setsid $to/v/bin/python -m benchmarks.gpu_lease $to/seen "$@" > $to/seen/out 2>&1 < /dev/null &
"""


def install(python: str, folder: Path, *, cuda: bool) -> None:
  """Installs what the project and its tests ask for, for a Python of Linux on x86_64."""
  versions = folder.with_name("versions.txt")
  freeze = ["uv", "pip", "freeze", "--exclude-editable"]
  versions.write_bytes(subprocess.run(freeze, cwd=ROOT, capture_output=True, check=True).stdout)
  command = ["uv", "pip", "install", "--quiet", "--target", folder, "--constraint", versions]
  command += ["--link-mode", "copy"]  # they are changed, and must not share a file with the cache
  command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
  command += ["-r", "setup.cfg", *(["--extra", "gpu"] if cuda else []), *TESTS]
  subprocess.run(command, cwd=ROOT, check=True)
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


def lay_out(packages: Path, project: Path, groups: Path) -> None:
  """Moves what is carried into groups/A, B and C."""
  nvidia, found = packages / "nvidia", groups / "B" / "packages" / "nvidia"
  for pattern in CALLED:
    for file in nvidia.glob(pattern):
      (found / file.relative_to(nvidia)).parent.mkdir(parents=True, exist_ok=True)
      shutil.move(file, found / file.relative_to(nvidia))
  if (nvidia / "nccl").exists():
    shutil.move(nvidia / "nccl", groups / "C" / "packages" / "nvidia" / "nccl")
  shutil.rmtree(nvidia, ignore_errors=True)
  (groups / "A").mkdir(parents=True)
  for each in (packages, project):
    shutil.move(each, groups / "A" / each.name)
  stubs = groups / "B" / "stubs"
  stubs.mkdir(parents=True)
  for name in OPENED:
    compiler = ["gcc", "-shared", "-x", "c", "-", "-o", stubs / name]
    subprocess.run(compiler, input=b"int nothing;", check=True)


def pack(folder: Path, start: Path, part_mib: int) -> list[int]:
  """Writes an archive of a folder in parts that begin with `start`; returns their bytes."""
  tar = subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE)
  zstd = ["zstd", "-9", "-T0", "--long=27", "-q"]
  small = subprocess.Popen(zstd, stdin=tar.stdout, stdout=subprocess.PIPE)
  split = ["split", "-b", f"{part_mib}M", "-d", "-a", "2", "-", f"{start}-"]
  subprocess.run(split, stdin=small.stdout, check=True)
  if tar.wait() or small.wait():
    raise SystemExit("tar or zstd failed")
  return [path.stat().st_size for path in sorted(start.parent.glob(f"{start.name}-*"))]


def add_zstd(out: Path) -> None:
  """Copies zstd and the libraries of it that a bare machine may lack."""
  program = shutil.which("zstd")
  assert program
  shutil.copy(program, out / "zstd")
  said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
  for library in re.findall(r"=> (\S+(?:zstd|lz4|lzma)\S+)", said):
    shutil.copy(library, out)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("out", type=Path)
  parser.add_argument("--chip", type=int, default=90, help="90 for sm_90")
  parser.add_argument("--without_cuda", action="store_true", help="only A: to try it on a CPU")
  parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]))
  parser.add_argument("--part_mib", type=int, default=61)
  given = parser.parse_args()
  given.out.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=given.out) as folder:
    packages, project, groups = (Path(folder, name) for name in ("packages", "project", "groups"))
    install(given.python, packages, cuda=not given.without_cuda)
    for library in [*packages.glob("tensorflow/*.so.2"), *packages.glob("nvidia/*/lib/*.so*")]:
      if zeroed := trim(library, given.chip):
        print(f"{library.name}: {zeroed >> 20} MiB are for other chips", flush=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
      (project / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, project / name, follow_symlinks=False)
    lay_out(packages, project, groups)
    for group in sorted(groups.iterdir()):
      sizes = pack(group, given.out / group.name, given.part_mib)
      print(f"{group.name}: {len(sizes)} parts, {sum(sizes) >> 20} MiB", flush=True)
  add_zstd(given.out)
  (given.out / "start.sh").write_text(START)


if __name__ == "__main__":
  main()
