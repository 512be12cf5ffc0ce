import doctest
import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
import tiny_imagenet
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train import data, stream

# The smallest of each: what is read whole, and what is read from disk as it goes.
RESIDENT = {"name": "mnist_subset", "split": "train[:17]"}
STREAM = {"name": "imagenet2012", "split": "train", "image_size": 32}
epoch_order = jax.jit(data.epoch_order, static_argnums=(2, 3))
BOTH = pytest.mark.parametrize(
    "options", [RESIDENT, STREAM], ids=["resident", "stream"]
)


def batch_sharding(num_devices):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("batch",))
    return NamedSharding(mesh, PartitionSpec("batch"))


def fetch(batches, count):
    """The next `count` batches as one, on the host."""
    host = [jax.tree.map(np.asarray, next(batches)) for _ in range(count)]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *host)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tiny_imagenet.prepare(folder)
    return folder


# Order


@pytest.mark.parametrize("num_examples", [1, 17, 100])
def test_an_epoch_visits_each_example_once(num_examples):
    order = epoch_order(jax.random.key(0), 3 * num_examples, num_examples, num_examples)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(num_examples))


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    orders = [epoch_order(jax.random.key(s), 0, 40, 20) for s in range(2)]
    epochs = {tuple(epoch.tolist()) for o in orders for epoch in o.reshape(2, 20)}
    assert len(epochs) == 4


@pytest.mark.parametrize("position", [0, 19, 47, 2**31 - 200])
@pytest.mark.parametrize("count", [1, 33])
def test_the_order_may_be_entered_anywhere(position, count):
    key, epoch = jax.random.key(1), position // 20
    whole = epoch_order(key, epoch * 20, 80, 20)
    part = epoch_order(key, position, count, 20)
    np.testing.assert_array_equal(part, whole[position - epoch * 20 :][:count])


def test_the_order_works_inside_a_scan():
    def step(position, _):
        return position + 5, epoch_order(jax.random.key(0), position, 5, 17)

    _, orders = jax.lax.scan(step, np.int32(3), length=7)
    expected = epoch_order(jax.random.key(0), 3, 35, 17)
    np.testing.assert_array_equal(orders.reshape(-1), expected)


# The training stream


def test_the_resident_stream_visits_each_example_once_an_epoch():
    images, labels = data.load_arrays(**RESIDENT)
    sharding = batch_sharding(4)
    batches = data.train_batches(**RESIDENT, batch_size=4, seed=0, sharding=sharding)
    batch = fetch(batches, 17)  # four epochs of 17
    seen = [
        (x.tobytes(), y) for x, y in zip(batch["image"], batch["label"], strict=True)
    ]
    whole = sorted((x.tobytes(), y) for x, y in zip(images, labels, strict=True))
    assert [sorted(seen[e * 17 :][:17]) for e in range(4)] == [whole] * 4


def test_the_disk_stream_visits_each_example_once_an_epoch():
    order = stream.epoch_orders(11, seed=0)
    epochs = np.array([order[i] for i in range(33)]).reshape(3, 11)
    np.testing.assert_array_equal(np.sort(epochs), [range(11)] * 3)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@BOTH
def test_a_resumed_stream_is_the_tail_of_the_whole(options, data_dir):
    options = options | {"data_dir": data_dir, "sharding": batch_sharding(4)}
    whole = fetch(data.train_batches(**options, batch_size=8, seed=2), 6)
    tail = fetch(data.train_batches(**options, batch_size=4, seed=2, position=20), 5)
    for name, rows in tail.items():
        np.testing.assert_array_equal(rows, whole[name][20:40])


@BOTH
@pytest.mark.parametrize("num_devices", [1, 2])
def test_batches_do_not_depend_on_the_number_of_devices(options, num_devices, data_dir):
    options = options | {"data_dir": data_dir, "batch_size": 8, "seed": 0}
    few = data.train_batches(**options, sharding=batch_sharding(num_devices))
    many = data.train_batches(**options, sharding=batch_sharding(4))
    jax.tree.map(np.testing.assert_array_equal, fetch(few, 3), fetch(many, 3))


@BOTH
def test_batches_are_global_arrays_with_the_sharding_asked_for(options, data_dir):
    sharding = batch_sharding(4)
    options = options | {"data_dir": data_dir, "sharding": sharding}
    batch = next(data.train_batches(**options, batch_size=8, seed=0))
    assert {array.sharding for array in batch.values()} == {sharding}
    assert batch["image"].dtype == np.uint8
    assert batch["label"].dtype == np.int32


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_read_the_rows_of_one_global_batch(num_processes, data_dir):
    source = data.open_split("imagenet2012", split="train", data_dir=data_dir)
    options = {"source": source, "batch_size": 8, "image_size": 32, "seed": 5}
    options |= {"position": 9, "order": stream.epoch_orders(len(source), seed=5)}
    whole = stream.TrainRows(**options, rows=range(8))(3)
    size = 8 // num_processes
    blocks = [range(p * size, (p + 1) * size) for p in range(num_processes)]
    parts = [stream.TrainRows(**options, rows=rows)(3) for rows in blocks]
    for name in ("image", "label", "mask"):
        joined = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(joined, whole[name])


@pytest.mark.slow
def test_worker_processes_give_the_batches_that_threads_give(data_dir, caplog):
    options = STREAM | {"data_dir": data_dir, "split": "broken", "batch_size": 4}
    options |= {"seed": 0, "sharding": batch_sharding(4)}
    threads = fetch(data.train_batches(**options), 4)
    messages = caplog.messages[:]
    caplog.clear()
    workers = fetch(data.train_batches(**options, num_workers=2), 4)
    jax.tree.map(np.testing.assert_array_equal, threads, workers)
    assert caplog.messages == messages


TWO_PROCESSES = """
    import jax, numpy as np, sys
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from train import data

    mesh = Mesh(np.array(jax.devices()), "batch")
    sharding = NamedSharding(mesh, PartitionSpec("batch"))
    for name in ("mnist_subset", "imagenet2012"):
        options = {"batch_size": 8, "sharding": sharding, "data_dir": sys.argv[3]}
        batch = next(data.train_batches(name, seed=0, image_size=32, **options))
        for shard in batch["image"].addressable_shards:
            total = np.asarray(shard.data).astype(int).sum()
            print(name, shard.index[0].start, total)
"""


@pytest.mark.slow
def test_two_processes_share_the_batches_of_one(data_dir):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES), address]
    flags = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    flags["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [*command, str(p), str(data_dir)],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            text=True,
        )
        for p in range(2)
    ]
    lines = [p.communicate(timeout=300)[0].splitlines() for p in processes]
    expected = []
    for name in ("mnist_subset", "imagenet2012"):
        options = {"batch_size": 8, "data_dir": data_dir, "image_size": 32}
        batches = data.train_batches(
            name, seed=0, sharding=batch_sharding(4), **options
        )
        image = fetch(batches, 1)["image"].astype(int)
        expected += [f"{name} {r} {image[r : r + 2].sum()}" for r in (0, 2, 4, 6)]
    assert sorted(lines[0] + lines[1]) == sorted(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6}, "batch_size=6 is not a positive multiple of the 4 devices"),
        ({"batch_size": 0}, "batch_size=0 is not a positive multiple"),
        ({"batch_size": 4, "position": -1}, "position=-1 must be at least 0"),
    ],
)
def test_impossible_sizes_are_refused_before_any_reading(options, message):
    with pytest.raises(ValueError, match=message):
        data.train_batches("mnist", seed=0, sharding=batch_sharding(4), **options)


# Evaluation


@pytest.mark.report(52)
@pytest.mark.parametrize("num_devices", [1, 4])
def test_evaluation_counts_each_resident_example_once(num_devices):
    images, labels = data.load_arrays(**RESIDENT)
    sharding = batch_sharding(num_devices)
    batches = data.eval_batches(**RESIDENT, batch_size=4, sharding=sharding)
    batch = fetch(batches, 5)
    assert next(batches, None) is None
    np.testing.assert_array_equal(batch["mask"], [True] * 17 + [False] * 3)
    np.testing.assert_array_equal(batch["image"][:17], images)
    np.testing.assert_array_equal(batch["label"][:17], labels)
    assert not batch["image"][17:].any()


@pytest.mark.report(52)
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_evaluation_counts_each_streamed_example_once(num_devices, data_dir):
    options = STREAM | {"split": "validation", "data_dir": data_dir}
    sharding = batch_sharding(num_devices)
    batches = data.eval_batches(**options, batch_size=4, sharding=sharding)
    batch = fetch(batches, 2)
    assert next(batches, None) is None
    np.testing.assert_array_equal(batch["mask"], [True] * 5 + [False] * 3)
    assert len({image.tobytes() for image in batch["image"][:5]}) == 5
    assert not batch["image"][5:].any()


def test_an_evaluation_batch_is_rounded_up_to_the_devices():
    options = {"batch_size": 6, "sharding": batch_sharding(4)}
    assert [len(b["mask"]) for b in data.eval_batches(**RESIDENT, **options)] == [8] * 3


def test_a_resident_split_is_decoded_once(monkeypatch):
    options = {"split": "train[:3]", "batch_size": 4, "sharding": batch_sharding(4)}
    first = fetch(data.eval_batches("mnist_subset", **options), 1)
    monkeypatch.setattr(data, "load_arrays", None)
    again = fetch(data.eval_batches("mnist_subset", **options), 1)
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(data).failed == 0
