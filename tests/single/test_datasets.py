"""The convergence benchmark's data: order, partition, files that are whole or not."""

import gzip
import struct
import threading

import mxnet as mx
import numpy as np
import pytest
from pictures import pack_records

LIMIT_S = 60
CIFAR, IMAGENET = (3, 32, 32), (3, 224, 224)


@pytest.fixture
def make_run(modules):
    """A Run with small batches."""
    run = modules("convergence_run").Run

    def make(dataset="mnist", method="mirror", **values):
        return run(dataset, "mlp", method, **{"batch_size": 3, **values})

    return make


@pytest.fixture
def opened(modules, make_run):
    """The batches of all ranks over `count` images, of which pixel 0 is the number."""
    batches = modules("batches")

    def make(count=20, classes=4, flips=True, **values):
        run = make_run(**values)
        images = np.zeros((count, 1, 2, 2), "uint8")
        images[:, 0, 0, 0] = np.arange(count)
        pair = images, np.arange(count) % classes
        settings = {"mean": (0.5,), "deviation": (0.25,), "white": 10, "flips": flips}
        ranks = range(run.num_workers)
        return [batches.ArrayBatches(run, r, pair, pair, **settings) for r in ranks]

    return make


def write_idx(path, array, zipped=True):
    """An IDX file of unsigned bytes."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype("uint8").tobytes()
    path.write_bytes(gzip.compress(content) if zipped else content)


def write_mnist(folder, count=8):
    """The four files: two gzipped, two not; images of 28 x 28."""
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (count, 28, 28))
    labels = np.arange(count) % 10
    write_idx(folder / "train-images-idx3-ubyte.gz", images)
    write_idx(folder / "train-labels-idx1-ubyte.gz", labels)
    write_idx(folder / "t10k-images-idx3-ubyte", images[:4], zipped=False)
    write_idx(folder / "t10k-labels-idx1-ubyte", labels[:4], zipped=False)
    return images, labels


def write_records(folder, name, count, shape, num_classes=10, indexed=True):
    """A RecordIO file of one-coloured images; label i % num_classes."""
    colours = [(100, 2 * i, i) for i in range(count)]
    pictures = [np.full((*shape[1:], 3), colour) for colour in colours]
    path = folder / f"{name}.rec"
    pack_records(path, pictures, np.arange(count) % num_classes)
    if not indexed:
        path.with_suffix(".idx").unlink()


def test_ranks_share_each_epoch_and_every_seed_has_its_own_order(opened):
    first, second = opened(num_workers=2)
    assert first.steps_per_epoch == second.steps_per_epoch == 20 // 6
    for epoch in range(2):
        taken = np.concatenate([first.indices(epoch), second.indices(epoch)])
        assert len(np.unique(taken)) == taken.size == 18
    assert (first.indices(0) != first.indices(1)).any()
    (other, _) = opened(num_workers=2, seed=2)
    assert (first.indices(0) != other.indices(0)).any()
    # Dealt out: the first batches of all ranks are the permutation's first samples.
    (alone,) = opened(num_workers=1)
    both = np.concatenate([first.indices(0)[0], second.indices(0)[0]])
    assert both.tolist() == alone.indices(0)[:2].ravel().tolist()


@pytest.mark.parametrize("partition", ["iid", "classes"])
def test_every_method_gets_the_same_batches_mirrored_alike(opened, partition):
    ours, stock = (
        opened(num_workers=2, partition=partition, method=method)
        for method in ("mirror", "dist_async scaled")
    )
    for mine, theirs in zip(ours, stock):
        for epoch in range(2):
            pairs = list(zip(mine.epoch(epoch), theirs.epoch(epoch)))
            assert len(pairs) == 3
            for (images, labels), (images_2, labels_2) in pairs:
                assert (images.asnumpy() == images_2.asnumpy()).all()
                assert (labels.asnumpy() == labels_2.asnumpy()).all()


def test_images_are_normalised_and_half_of_them_mirrored(opened):
    (batches,) = opened(num_workers=1, count=200, batch_size=50)
    mirrored = batches.mirrored(0)
    assert 70 < mirrored.sum() < 130
    assert (mirrored != batches.mirrored(1)).any()
    for index, (images, labels) in zip(batches.indices(0), batches.epoch(0)):
        assert images.dtype == labels.dtype == np.float32
        assert labels.asnumpy().tolist() == (index % 4).tolist()
        values = images.asnumpy()[:, 0, 0]
        # (pixel / 10 - 0.5) / 0.25
        number = np.where(mirrored[index], values[:, 1], values[:, 0])
        np.testing.assert_allclose(number, index * 0.4 - 2, rtol=1e-5)
    (plain,) = opened(num_workers=1, flips=False)
    assert plain.mirrored(0) is None


def test_each_rank_has_some_classes_only(opened):
    ranks = opened(count=24, num_workers=2, partition="classes", flips=False)
    seen = []
    for batches in ranks:
        epochs = [batches.indices(epoch) for epoch in range(2)]
        assert sorted(epochs[0].ravel()) == sorted(epochs[1].ravel())
        assert (epochs[0] != epochs[1]).any()
        seen.append(set(epochs[0].ravel() % 4))
    assert seen == [{0, 1}, {2, 3}]


def test_test_images_are_shared_and_fixed_ones_are_not(opened):
    ranks = opened(count=11, num_workers=2, max_test=9)
    found = [
        [round((x - -2) / 0.4) for i, _ in r.test() for x in i.asnumpy()[:, 0, 0, 0]]
        for r in ranks
    ]
    assert found == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    fixed = [[i.asnumpy() for i in r.fixed(7)] for r in ranks]
    assert len(fixed[0]) == 2  # whole batches of 3
    np.testing.assert_array_equal(*fixed)
    assert [len(list(ranks[0].fixed(n))) for n in (1, 3, 99)] == [1, 1, 3]


@pytest.mark.parametrize("values", [{"max_train": 5}, {"batch_size": 11}])
def test_too_few_images_for_a_batch_on_each_worker(opened, modules, values):
    with pytest.raises(modules("batches").DataError) as caught:
        opened(num_workers=2, **values)
    need = 2 * values.get("batch_size", 3)
    assert f"{values.get('max_train', 20)} training images" in str(caught.value)
    assert f"need {need} at least" in str(caught.value)


def test_unknown_names_are_refused(opened, modules, tmp_path):
    with pytest.raises(ValueError, match="'half'; allowed are 'iid' and 'classes'"):
        opened(partition="half")
    with pytest.raises(ValueError, match="'mnits'; allowed are 'digits', 'mnist'"):
        modules("datasets").prepare("mnits", None, tmp_path)


def test_idx_files_are_read_once_even_by_two_at_once(modules, make_run, tmp_path):
    datasets = modules("datasets")
    images, labels = write_mnist(tmp_path)
    found = []

    def prepare():
        found.append(datasets.prepare("mnist", tmp_path, tmp_path / "cache"))

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(set(found)) == 1
    assert list((tmp_path / "cache").iterdir()) == [found[0]]
    run = make_run(num_workers=1, batch_size=8)
    batches = datasets.open_dataset(run, found[0], 0)
    index, (got, got_labels) = batches.indices(0)[0], next(batches.epoch(0))
    expected = (images[index] / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(got.asnumpy()[:, 0], expected, atol=1e-5)
    assert got_labels.asnumpy().tolist() == labels[index].tolist()
    assert sum(len(part) for _, part in batches.test()) == 4
    write_mnist(tmp_path, count=9)
    assert datasets.prepare("mnist", tmp_path, tmp_path / "cache") != found[0]


def test_recordio_is_decoded_with_its_labels(modules, make_run, tmp_path):
    datasets = modules("datasets")
    write_records(tmp_path, "train", 12, CIFAR)
    write_records(tmp_path, "test", 4, CIFAR, indexed=False)
    folder = datasets.prepare("cifar10", tmp_path, tmp_path / "cache")
    images = np.load(folder / "train_images.npy")
    assert images.dtype == np.uint8 and images.shape == (12, *CIFAR)
    colours = [[100, 2 * i, i] for i in range(12)]  # red, green, blue
    assert images[:, :, 5, 7].tolist() == colours
    labels = np.load(folder / "train_labels.npy")
    assert labels.tolist() == [*range(10), 0, 1]
    assert len(np.load(folder / "test_labels.npy")) == 4


def test_imagenet_is_streamed_in_equal_numbers(modules, make_run, tmp_path):
    datasets = modules("datasets")
    write_records(tmp_path, "train", 13, IMAGENET, num_classes=1000)
    write_records(tmp_path, "val", 5, IMAGENET)
    folder = datasets.prepare("imagenet", tmp_path, tmp_path / "cache")
    assert folder == tmp_path and not (tmp_path / "cache").exists()
    run = make_run("imagenet", num_workers=2, batch_size=2)
    ranks = [datasets.open_dataset(run, folder, rank) for rank in range(2)]
    labels = [[y.asnumpy().tolist() for _, y in r.epoch(0)] for r in ranks]
    assert [len(steps) for steps in labels] == [3, 3]
    seen = [{n for step in steps for n in step} for steps in labels]
    assert not seen[0] & seen[1] and all(len(part) == 6 for part in seen)
    again = [y.asnumpy().tolist() for _, y in ranks[0].epoch(0)]
    assert again == labels[0]
    assert [y.asnumpy().tolist() for _, y in ranks[0].epoch(1)] != again
    images = next(ranks[0].epoch(0))[0].asnumpy()
    assert images.shape == (2, *IMAGENET)
    red = (100 / 255 - 0.485) / 0.229
    np.testing.assert_allclose(images[:, 0], red, atol=1e-3)
    test = sorted(int(n) for r in ranks for _, y in r.test() for n in y.asnumpy())
    assert test == [0, 1, 2, 3, 4]
    fixed = [[x.asnumpy() for x in r.fixed(4)] for r in ranks]
    assert len(fixed[0]) == 2 and len(list(ranks[0].fixed(1))) == 1
    np.testing.assert_array_equal(*fixed)


def test_missing_files_are_named_with_all_that_is_looked_for(modules, tmp_path):
    datasets = modules("datasets")
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(datasets.DataError) as caught:
        datasets.prepare("mnist", tmp_path, tmp_path / "cache")
    text = str(caught.value)
    assert f"t10k-labels-idx1-ubyte not found in {tmp_path}" in text
    assert "train-images-idx3-ubyte" in text and ".gz" in text
    with pytest.raises(datasets.DataError, match=r"give the folder with train\.rec"):
        datasets.prepare("cifar10", None, tmp_path)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-30])


def cut_idx(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))


def no_idx(path):
    path.write_bytes(gzip.compress(b"a text, and no images"))


def fewer(path):
    write_idx(path, np.zeros((7, 28, 28)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "cannot be read"),
        (cut_idx, "announces 8 x 28 x 28: it is truncated"),
        (no_idx, "no IDX file of bytes with 3 axes"),
        (fewer, "7 images for 8 labels"),
    ],
)
def test_bad_idx_files_are_refused_and_nothing_is_cached(
    modules, tmp_path, spoil, message
):
    datasets = modules("datasets")
    write_mnist(tmp_path)
    spoil(tmp_path / "train-images-idx3-ubyte.gz")
    with pytest.raises(datasets.DataError, match=message) as caught:
        datasets.prepare("mnist", tmp_path, tmp_path / "cache")
    assert "train-images-idx3-ubyte.gz" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def no_records(path):
    path.write_bytes(b"this is no RecordIO file at all")


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("spoil", [truncate, no_records, empty])
def test_bad_recordio_files_are_refused(modules, tmp_path, spoil, indexed):
    datasets = modules("datasets")
    write_records(tmp_path, "train", 4, CIFAR, indexed=indexed)
    write_records(tmp_path, "test", 4, CIFAR)
    spoil(tmp_path / "train.rec")
    with pytest.raises(datasets.DataError, match=r"train\.rec .*truncated"):
        datasets.prepare("cifar10", tmp_path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_images_and_labels_of_another_data_set_are_refused(modules, tmp_path):
    datasets = modules("datasets")
    write_records(tmp_path, "test", 4, CIFAR)
    write_records(tmp_path, "train", 4, (3, 28, 28))
    with pytest.raises(datasets.DataError, match=r"0 good images: shape \(3, 28, 28\)"):
        datasets.prepare("cifar10", tmp_path, tmp_path / "cache")
    write_records(tmp_path, "train", 12, CIFAR, num_classes=12)
    with pytest.raises(datasets.DataError, match="10 good images: .* label 10"):
        datasets.prepare("cifar10", tmp_path, tmp_path / "cache")


def test_an_index_of_another_file_is_refused(modules, tmp_path):
    datasets = modules("datasets")
    write_records(tmp_path, "val", 4, IMAGENET)
    write_records(tmp_path, "train", 4, IMAGENET)
    (tmp_path / "train.idx").write_text("0\t3\n")
    with pytest.raises(datasets.DataError, match="no record at byte 3"):
        datasets.prepare("imagenet", tmp_path, tmp_path / "cache")
    (tmp_path / "train.idx").write_text("no index\n")
    with pytest.raises(datasets.DataError, match=r"train\.idx is no index"):
        datasets.prepare("imagenet", tmp_path, tmp_path / "cache")


def test_streamed_images_cannot_be_dealt_out_by_class(modules, make_run, tmp_path):
    datasets = modules("datasets")
    for name in ("train", "val"):
        write_records(tmp_path, name, 4, IMAGENET)
    run = make_run("imagenet", partition="classes", batch_size=1)
    with pytest.raises(datasets.DataError, match="only 'iid' is possible"):
        datasets.open_dataset(run, tmp_path, 0)
    mx.nd.waitall()
