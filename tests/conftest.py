"""Fixtures of the engine tests, and the order in which they run."""

import signal

import pytest
from engines import DTYPES, Engines, share_of_digits, with_adapter
from hypothesis import settings

# The same examples in every run; no limit on an example's time, which a busy machine decides.
settings.register_profile("kit", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("kit")

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Pure tests first, then engine tests by the dtype of their engine: each dtype is loaded once.

    Worker processes take groups: the tests of one dtype's engine, or else those of one file or notebook.
    """

    def engine(item):
        marker = item.get_closest_marker("engine")
        return -1 if marker is None else DTYPES.index(marker.args[0]) if marker.args else len(DTYPES)

    items.sort(key=engine)
    for item in items:
        place = engine(item)
        item.add_marker(pytest.mark.xdist_group(DTYPES[place] if 0 <= place < len(DTYPES) else item.path.name))


def pytest_runtest_setup(item):
    """GPU tests are skipped where there is none; torch is asked only when there is such a test."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


def pytest_terminal_summary(terminalreporter):
    """How many notebooks ran: nbval reports each cell as a test of its own."""
    cells = {"passed": [], "failed": [], "error": []}
    for outcome, names in cells.items():
        reports = terminalreporter.stats.get(outcome, [])
        names += [r.nodeid.split("::")[0] for r in reports if ".ipynb::" in r.nodeid]
    ran = {name for names in cells.values() for name in names}
    if ran:
        failed = {*cells["failed"], *cells["error"]}
        told = f"failed: {', '.join(sorted(failed))}" if failed else "each without an error"
        terminalreporter.write_line(f"{len(ran)} notebooks ran, {sum(map(len, cells.values()))} cells, {told}")


@pytest.fixture(scope="session")
def engines():
    """The shared engine, closed at the end."""
    from kit.loading import close_current

    yield Engines()
    close_current()


@pytest.fixture
def dtype(request) -> str:
    """The dtype that the test's `engine` marker names."""
    return request.node.get_closest_marker("engine").args[0]


@pytest.fixture
def model(engines, dtype):
    """A base model beside the shared engine."""
    return engines.model(dtype)


@pytest.fixture
def tokenizer(engines, dtype):
    """Its tokenizer."""
    engines.get(dtype)
    return engines.tokenizer


@pytest.fixture(scope="session")
def problems():
    """A few training problems of the bundled task."""
    from kit import arithmetic

    return arithmetic.make_dataset("rl", 64, 0)


@pytest.fixture
def make_trainer(engines, dtype, problems, tmp_path):
    """A function that makes a trainer: 16 completions of at most 32 tokens, its records in `trainer.seen`."""
    from kit import GRPOConfig, GRPOTrainer

    def make(
        *, policy=None, reward_funcs=share_of_digits, train_dataset=problems, name="run", config=GRPOConfig, **more
    ):
        arguments = {
            "output_dir": str(tmp_path / name),
            "max_steps": 3,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 32,
            "save_strategy": "no",
        }
        seen = []
        trainer = GRPOTrainer(
            model=with_adapter(engines.model(dtype)) if policy is None else policy,
            reward_funcs=reward_funcs,
            args=config(**(arguments | more)),
            train_dataset=train_dataset,
            processing_class=engines.tokenizer,
            on_record=seen.append,
        )
        trainer.seen = seen
        return trainer

    return make
