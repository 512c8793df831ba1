"""The vision part of a checkpoint is what from_pretrained makes of it, and nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from onereplay.errors import CheckpointError, UnsupportedModelError
from onereplay.loading import load_vision_model, random_weights_, vision_model
from onereplay.presets import get_preset, hf_config

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Family:
    """One model family: its preset, its parts, and the prefixes that its checkpoints have used for them."""

    preset: str
    parts: tuple[str, ...]
    layouts: dict[str, dict[str, str]]


TOWER_AND_PROJECTOR = ("vision_tower", "multi_modal_projector")
FAMILIES = {
    "qwen2_5_vl": Family(
        "qwen2_5_vl-7b@tiny",
        ("visual",),
        {"old": {"visual.": "visual."}, "new": {"visual.": "model.visual."}},
    ),
    "internvl": Family(
        "internvl3-8b@tiny",
        TOWER_AND_PROJECTOR,
        {
            "old": {"vision_tower.": "vision_tower.", "multi_modal_projector.": "multi_modal_projector."},
            "new": {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
        },
    ),
    "lfm2_vl": Family(
        "lfm2_vl-450m@tiny",
        TOWER_AND_PROJECTOR,
        {
            "old": {
                "vision_tower.": "model.vision_tower.vision_model.",
                "multi_modal_projector.": "model.multi_modal_projector.",
            },
            "new": {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
        },
    ),
}
LAYOUTS = [(family, layout) for family, facts in FAMILIES.items() for layout in facts.layouts]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def saved(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole small model with random weights, as save_pretrained writes it."""
    return _save(family, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return _save(FAMILIES["qwen2_5_vl"], tmp_path)


# -------- equality with plain


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_features_are_bit_identical_to_from_pretrained(family: Family, saved: Path, dtype: torch.dtype) -> None:
    ours = load_vision_model(saved, device="cpu", dtype=dtype, parts=family.parts)
    plain = AutoModelForImageTextToText.from_pretrained(saved, dtype=dtype)
    assert torch.equal(_features(ours, family), _features(plain, family))


def test_features_are_bit_identical_from_shards(family: Family, tmp_path: Path) -> None:
    _save(family, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = load_vision_model(tmp_path, device="cpu", dtype=FP32, parts=family.parts)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=FP32)
    assert torch.equal(_features(ours, family), _features(plain, family))


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_old_and_new_names_load_alike(name: str, layout: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tensors = _vision_tensors(family, seed=3)
    _save(family, tmp_path)
    _rewrite(tmp_path, lambda _: {_laid_out(key, family, layout): value for key, value in tensors.items()}, family)
    ours = load_vision_model(tmp_path, device="cpu", dtype=FP32, parts=family.parts)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=FP32)
    assert torch.equal(_features(ours, family), _features(plain, family))
    for key, value in tensors.items():
        assert torch.equal(ours.state_dict()[key], value)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_buffers_have_the_values_and_dtypes_of_from_pretrained(family: Family, saved: Path, dtype: torch.dtype) -> None:
    ours = load_vision_model(saved, device="cpu", dtype=dtype, parts=family.parts)
    plain = AutoModelForImageTextToText.from_pretrained(saved, dtype=dtype).model
    for part in family.parts:
        expected = dict(plain.get_submodule(part).named_buffers())
        buffers = dict(ours.get_submodule(part).named_buffers())
        assert buffers.keys() == expected.keys()
        for name, buffer in buffers.items():
            assert buffer.dtype == expected[name].dtype
            assert torch.equal(buffer, expected[name])


def test_rotary_frequencies_stay_in_fp32_when_the_weights_do_not() -> None:
    model = vision_model(_config("qwen2_5_vl"), device="cpu", dtype=BF16, parts=("visual",))
    assert model.visual.rotary_pos_emb.inv_freq.dtype == FP32
    assert {parameter.dtype for parameter in model.parameters()} == {BF16}


# -------- nothing of the language model


def test_only_the_parts_hold_memory(family: Family, saved: Path) -> None:
    model = load_vision_model(saved, device="cpu", dtype=FP32, parts=family.parts)
    assert not model.training
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert name.startswith(family.parts)
        assert tensor.device == CPU
        assert not tensor.requires_grad
    with pytest.raises(UnsupportedModelError, match="language_model was not loaded"):
        model.language_model(inputs_embeds=torch.zeros(1, 1, 32))


def test_a_large_language_model_is_never_allocated() -> None:
    config = _config("qwen2_5_vl")
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.vocab_size = 65536, 262144, 1_000_000
    text.num_hidden_layers, text.layer_types = 40, ["full_attention"] * 40
    model = vision_model(config, device="cpu", dtype=FP32, parts=("visual",))
    assert sum(parameter.numel() for parameter in model.parameters()) < 10**6


def test_the_language_models_shard_may_be_absent(family: Family, tmp_path: Path) -> None:
    _save(family, tmp_path)
    expected = _features(load_vision_model(tmp_path, device="cpu", dtype=FP32, parts=family.parts), family)
    _split(tmp_path, family)
    (tmp_path / "language.safetensors").unlink()
    ours = load_vision_model(tmp_path, device="cpu", dtype=FP32, parts=family.parts)
    assert torch.equal(_features(ours, family), expected)


def test_a_hub_checkpoint_is_asked_for_its_vision_shards_only(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _split(qwen, FAMILIES["qwen2_5_vl"])
    asked = _serve(qwen, monkeypatch)
    load_vision_model("some/model", device="cpu", dtype=FP32, parts=("visual",), revision="v1")
    assert set(asked) == {
        ("config.json", "v1"),
        ("model.safetensors", "v1"),
        ("model.safetensors.index.json", "v1"),
        ("vision.safetensors", "v1"),
    }


def test_language_tensors_in_the_same_file_are_not_read(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = _spy_on_reads(monkeypatch)
    load_vision_model(qwen, device="cpu", dtype=FP32, parts=("visual",))
    assert len(read) == len(_vision_tensors(FAMILIES["qwen2_5_vl"]))
    assert all("visual." in key for key in read)


def test_the_callers_config_is_left_alone() -> None:
    config = _config("internvl")
    before = config.to_dict()
    vision_model(config, device="cpu", dtype=BF16, parts=TOWER_AND_PROJECTOR)
    assert config.to_dict() == before


def test_an_unknown_part_is_refused_with_the_parts_that_exist() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no part 'vision'.*it has visual, language_model"):
        vision_model(_config("qwen2_5_vl"), device="cpu", dtype=FP32, parts=("vision",))


def test_a_config_that_is_no_vision_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no model for PreTrainedConfig"):
        vision_model(PreTrainedConfig(), device="cpu", dtype=FP32, parts=())
    _config("qwen2_5_vl").text_config.save_pretrained(tmp_path)
    save_file({"norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="has no part 'visual'"):
        load_vision_model(tmp_path, device="cpu", dtype=FP32, parts=("visual",))


# -------- checkpoints that do not fit


def test_a_missing_weight_is_named_with_its_shape(qwen: Path) -> None:
    _rewrite(qwen, lambda tensors: _without(tensors, "blocks.1.attn.proj.bias"))
    with pytest.raises(CheckpointError, match=r"visual\.blocks\.1\.attn\.proj\.bias of shape \(64,\) in model\.safe"):
        _load(qwen)


def test_an_unexpected_weight_under_a_part_is_named_with_its_file(qwen: Path) -> None:
    _rewrite(qwen, lambda tensors: {**tensors, "visual.blocks.9.norm1.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"visual\.blocks\.9\.norm1\.weight in model\.safetensors"):
        _load(qwen)


def test_a_weight_of_another_shape_is_named_with_both_shapes(qwen: Path) -> None:
    _rewrite(qwen, lambda tensors: {**tensors, "visual.merger.ln_q.weight": torch.ones(65)})
    match = r"visual\.merger\.ln_q\.weight in .*model\.safetensors has shape \(65,\); .* has \(64,\)"
    with pytest.raises(CheckpointError, match=match):
        _load(qwen)


def test_two_names_for_one_weight_are_refused(qwen: Path) -> None:
    _rewrite(qwen, lambda tensors: {**tensors, "model.visual.merger.ln_q.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"visual\.merger\.ln_q\.weight twice"):
        _load(qwen)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(qwen: Path, dtype: torch.dtype) -> None:
    _rewrite(qwen, lambda tensors: {**tensors, "visual.merger.ln_q.weight": torch.ones(64).to(dtype)})
    with pytest.raises(CheckpointError, match="quantised"):
        _load(qwen)


def test_a_stored_rotary_table_is_ignored(qwen: Path) -> None:
    expected = _load(qwen).visual.rotary_pos_emb.inv_freq
    _rewrite(qwen, lambda tensors: {**tensors, "visual.rotary_pos_emb.inv_freq": torch.ones(4)})
    assert torch.equal(_load(qwen).visual.rotary_pos_emb.inv_freq, expected)


def test_a_conversion_of_values_is_refused(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    plain = conversion_mapping.get_model_conversion_mapping

    def with_converter(model: object) -> list[object]:
        targets = [r"attn.q.weight", r"attn.k.weight", r"attn.v.weight"]
        return [*plain(model), WeightConverter(r"attn.qkv.weight", targets, operations=[Chunk(dim=0)])]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", with_converter)
    with pytest.raises(
        CheckpointError, match=r"visual\.blocks\.0\.attn\.qkv\.weight in model\.safetensors.*conversion"
    ):
        _load(qwen)


def test_pickled_weights_are_refused(qwen: Path) -> None:
    (qwen / "model.safetensors").rename(qwen / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*only safetensors"):
        _load(qwen)


def test_a_directory_without_weights_says_what_is_missing(qwen: Path) -> None:
    (qwen / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        _load(qwen)


def test_a_directory_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no file config\.json"):
        _load(tmp_path)


def test_a_missing_shard_is_named(qwen: Path) -> None:
    _split(qwen, FAMILIES["qwen2_5_vl"])
    (qwen / "vision.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no file vision\.safetensors"):
        _load(qwen)


def test_an_index_that_names_the_wrong_shard_is_refused(qwen: Path) -> None:
    _split(qwen, FAMILIES["qwen2_5_vl"])
    index = json.loads((qwen / "model.safetensors.index.json").read_text())
    index["weight_map"]["visual.merger.ln_q.weight"] = "language.safetensors"
    (qwen / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"language\.safetensors has no tensor visual\.merger\.ln_q\.weight"):
        _load(qwen)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_refused(qwen: Path, text: str) -> None:
    (qwen / "model.safetensors").unlink()
    (qwen / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is not an index"):
        _load(qwen)


def test_a_truncated_file_is_named(qwen: Path) -> None:
    content = (qwen / "model.safetensors").read_bytes()
    (qwen / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        _load(qwen)


@pytest.mark.parametrize("source", ["/no/such/directory", "no/such/model/here"])
def test_a_path_that_does_not_exist_is_named(source: str) -> None:
    with pytest.raises(CheckpointError, match=f"{source} is neither a directory nor a hub id"):
        _load(Path(source))


def test_a_hub_id_without_the_hub_is_an_error_and_no_traceback_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"nobody/no-such-model is not a directory, and no hub id"):
        load_vision_model("nobody/no-such-model", device="cpu", dtype=FP32, parts=("visual",))


def test_a_model_type_that_transformers_lacks_is_refused(qwen: Path) -> None:
    (qwen / "config.json").write_text(json.dumps({"model_type": "nobody_vl"}))
    with pytest.raises(UnsupportedModelError, match="nobody_vl"):
        _load(qwen)


# -------- random weights


def test_random_weights_follow_the_seed_and_the_name_only(family: Family) -> None:
    first, again, other = (_random(family, seed) for seed in (0, 0, 1))
    reordered = vision_model(hf_config(get_preset(family.preset)), device="cpu", dtype=FP32, parts=family.parts)
    random_weights_(reordered, family.parts[::-1], 0)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, reordered.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))


def test_random_weights_in_bf16_are_the_fp32_ones_rounded(family: Family) -> None:
    exact, rounded = _random(family, 0), _random(family, 0, BF16)
    for name, parameter in exact.named_parameters():
        assert torch.equal(parameter.to(BF16), rounded.get_parameter(name))


def test_no_parameter_is_constant(family: Family) -> None:
    for name, parameter in _random(family, 0).named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.std() > 0.02, name


def test_random_features_are_of_order_one_and_depend_on_positions(family: Family) -> None:
    model = _random(family, 0)
    features, rolled = _features(model, family), _features(model, family, roll=True)
    assert 0.3 < features.std() < 3
    nearest = torch.cdist(features, rolled).min(dim=1).values.mean() / features.norm(dim=1).mean()
    assert nearest > 0.1, "the same patches at other positions gave the same features"


# -------- helpers


def _config(name: str) -> Any:
    return hf_config(get_preset(FAMILIES[name].preset))


def _save(family: Family, folder: Path, **how: Any) -> Path:
    model = AutoModelForImageTextToText.from_config(hf_config(get_preset(family.preset)))
    random_weights_(model.model, family.parts, 0)
    model.save_pretrained(folder, **how)
    return folder


def _load(source: Path) -> Any:
    return load_vision_model(source, device="cpu", dtype=FP32, parts=("visual",))


def _random(family: Family, seed: int, dtype: torch.dtype = FP32) -> Any:
    model = vision_model(hf_config(get_preset(family.preset)), device="cpu", dtype=dtype, parts=family.parts)
    random_weights_(model, family.parts, seed)
    return model


def _vision_tensors(family: Family, seed: int = 0) -> dict[str, Tensor]:
    """Weights under the names of the base model."""
    return {name: tensor.clone() for name, tensor in _random(family, seed).state_dict().items()}


def _laid_out(name: str, family: Family, layout: str) -> str:
    prefix = next(prefix for prefix in family.layouts[layout] if name.startswith(prefix))
    return family.layouts[layout][prefix] + name.removeprefix(prefix)


def _rewrite(
    folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], family: Family | None = None
) -> None:
    """Replace the tensors of the one file; with a family, its vision tensors only."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    language = {key: value for key, value in tensors.items() if family and not _is_vision(key, family)}
    save_file({**language, **change(tensors)}, path, metadata={"format": "pt"})


def _without(tensors: dict[str, Tensor], ending: str) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if not key.endswith(ending)}


def _is_vision(key: str, family: Family) -> bool:
    return any(f"{part}." in key for part in family.parts)


def _split(folder: Path, family: Family) -> None:
    """Move the one file into a vision shard and a language shard with an index."""
    tensors = load_file(folder / "model.safetensors")
    files = {key: "vision.safetensors" if _is_vision(key, family) else "language.safetensors" for key in tensors}
    for file in set(files.values()):
        save_file({key: value for key, value in tensors.items() if files[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "model.safetensors").unlink()


def _serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Let the hub client find every file in `folder`; the requests are recorded."""
    from huggingface_hub.errors import EntryNotFoundError

    asked: list[tuple[str, str | None]] = []

    def download(repo: str, name: str, *, revision: str | None) -> str:
        asked.append((name, revision))
        if not (folder / name).is_file():
            raise EntryNotFoundError(name)
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return asked


def _spy_on_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that safetensors gives out from here on."""
    import safetensors

    read: list[str] = []
    plain: Any = safetensors.safe_open

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.opened = plain(*args, **kwargs)

        def __enter__(self) -> Spy:
            self.file = self.opened.__enter__()
            return self

        def __exit__(self, *exc: Any) -> None:
            self.opened.__exit__(*exc)

        def keys(self) -> Iterator[str]:
            return iter(self.file.keys())

        def get_slice(self, key: str) -> Any:
            return self.file.get_slice(key)

        def get_tensor(self, key: str) -> Tensor:
            read.append(key)
            tensor: Tensor = self.file.get_tensor(key)
            return tensor

    monkeypatch.setattr("safetensors.safe_open", Spy)
    return read


def _features(model: Any, family: Family, *, roll: bool = False) -> Tensor:
    """Rows of the stock get_image_features; with `roll`, of the same patches at other positions."""
    with torch.inference_mode():
        rows = model.get_image_features(**_inputs(family, roll)).pooler_output
    return torch.cat([item.flatten(0, -2) for item in rows]).float()


def _inputs(family: Family, roll: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if family.preset.startswith("qwen"):
        pixels = torch.randn(12 * 20 + 4 * 4, 1176, generator=generator)
        grids = torch.tensor([[1, 12, 20], [1, 4, 4]])
        return {"pixel_values": pixels.roll(4 * 31, 0) if roll else pixels, "image_grid_thw": grids}
    if family.preset.startswith("internvl"):
        pixels = torch.randn(2, 3, 56, 56, generator=generator)
        return {"pixel_values": pixels.roll(28, -1) if roll else pixels}
    pixels = torch.randn(2, 64, 768, generator=generator)
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 24:] = 0
    return {
        "pixel_values": pixels.roll(16, 1) if roll else pixels,
        "spatial_shapes": torch.tensor([[8, 8], [4, 6]]),
        "pixel_attention_mask": mask,
    }
