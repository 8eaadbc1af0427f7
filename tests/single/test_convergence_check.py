"""Runs that must not be made: with other data than before, or warming up throughout."""

import functools
import gzip
import os
import runpy
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from convergence_results import make_run, outcome
from pictures import write_records

import odsgd_kvstore

PROGRAM = Path(odsgd_kvstore.__file__).absolute().parents[1] / "benchmarks"
PROGRAM /= "benchmark_convergence.py"
FEW = {"num_workers": 2, "batch_size": 2, "epochs": 2}  # 4 steps on 8 images


@pytest.fixture
def new_run(modules):
    """Make a run, by default a short one of the mnist preset."""
    return functools.partial(make_run, modules("convergence_run").Run, **FEW)


@pytest.fixture
def store(modules, tmp_path):
    return modules("convergence_store").Store(tmp_path / "results")


def write_mnist(folder, first=0, zipped=False):
    """MNIST's four files with 8 images each; the first pixel is `first`."""
    folder.mkdir(exist_ok=True)
    images = np.zeros((8, 28, 28), "uint8")
    images[0, 0, 0] = first
    arrays = {"images-idx3": images, "labels-idx1": np.arange(8, dtype="uint8")}
    for part in ("train", "t10k"):
        for name, array in arrays.items():
            header = bytes([0, 0, 8, array.ndim])
            header += struct.pack(f">{array.ndim}I", *array.shape)
            content = header + array.tobytes()
            path = folder / f"{part}-{name}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def test_decoded_data_have_a_digest_of_their_content(modules, tmp_path):
    datasets = modules("datasets")
    folders = [
        datasets.prepare("mnist", write_mnist(tmp_path / name, *how), tmp_path / "c")
        for name, *how in (("a",), ("b", 0, True), ("c", 1))
    ]
    assert len(set(folders)) == 3
    first, zipped, other = map(datasets.digest, folders)
    assert first == zipped != other and len(first) == 64
    for folder in folders:  # it is kept, so that it is computed once
        (folder / "test_labels.npy").unlink()
    assert [datasets.digest(folder) for folder in folders] == [first, first, other]
    assert len(list(folders[0].iterdir())) == 4  # three arrays and the digest


def test_streamed_data_have_a_digest_of_sizes_and_indices(modules, tmp_path):
    datasets = modules("datasets")
    for name in ("train", "val"):
        write_records(tmp_path / f"{name}.rec", range(4))
    before = datasets.digest(datasets.prepare("imagenet", tmp_path, tmp_path / "c"))
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    assert datasets.digest(copy) == before
    os.truncate(copy / "val.rec", os.path.getsize(copy / "val.rec") - 1)
    assert datasets.digest(copy) != before
    write_records(tmp_path / "train.rec", range(5))
    assert datasets.digest(tmp_path) != before


@pytest.mark.parametrize("kept", [True, False])
def test_data_other_than_those_of_a_stored_result_are_refused(
    modules, new_run, store, tmp_path, kept
):
    check, datasets = modules("convergence_check"), modules("datasets")
    same, other = (
        write_mnist(tmp_path / n, i) for i, n in enumerate(("same", "other"))
    )
    folder = datasets.prepare("mnist", same, store.folder / datasets.CACHE)
    content = outcome(new_run("dist_sync"))
    if kept:  # older files do not say of which data they are
        content["data"] = datasets.digest(folder)
    store.save(new_run("dist_sync"), content)
    results = store.read().results.values()
    assert [result.data for result in results] == [content.get("data")]

    def try_data(data, dataset="mnist"):
        run = new_run(dataset=dataset)
        check.check_same_data([run], results, data, store.folder)

    try_data(same)
    try_data(None, "digits")
    if kept:
        text = f"results in {store.folder} are of other mnist data; give another --ou"
        with pytest.raises(check.RunError, match=text):
            try_data(other)
    else:
        try_data(other)


def test_a_warmup_that_never_ends_is_refused(modules, new_run, tmp_path):
    check, data = modules("convergence_check"), write_mnist(tmp_path / "data")
    text = (
        "'mirror' would be dist_sync throughout: warmup_steps is 4, and each of the 2 "
        "workers makes 4 steps. Give a --warmup-steps below 4"
    )
    good = [new_run(warmup_steps=3), new_run("dist_sync", warmup_steps=4)]
    check.check_runs(good, data, tmp_path)
    with pytest.raises(check.RunError, match=text):
        check.check_runs([*good, new_run(warmup_steps=4)], data, tmp_path)
    longer = new_run(warmup_steps=4, epochs=3)
    check.check_runs([*good, longer], data, tmp_path)


@pytest.fixture
def main(monkeypatch, modules, tmp_path):
    """Run the program in this process; what it ends with."""
    modules("convergence_check")  # the folder is on the path

    def call(*args):
        argv = [str(PROGRAM), "--preset", "smoke", "--output", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", [*argv, *args])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PROGRAM), run_name="__main__")
        return ended.value.code

    return call


def test_an_output_that_is_a_file_ends_with_one_line(main, tmp_path):
    (tmp_path / "out").write_text("")
    path = tmp_path / "out" / "convergence"
    assert main() == f"benchmark_convergence: {path}: Not a directory"


@pytest.mark.parametrize("step", ["probe", "decode"])
def test_a_full_disk_ends_with_one_line(main, modules, tmp_path, monkeypatch, step):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if step == "probe":
        monkeypatch.setattr(Path, "write_text", fail)
        wanted = f"{tmp_path}/out/convergence: No space left on device"
    else:
        monkeypatch.setattr(modules("datasets").np, "save", fail)
        wanted = (
            f"the decoded data cannot be kept in {tmp_path}/out/convergence/cache: "
        )
        wanted += "No space left on device. Is the disk full?"
    text = main()
    assert text.startswith(f"benchmark_convergence: {wanted}") and "\n" not in text
    left = [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert left == []
