"""A diagnosis.json written by hand: every key of the schema, with numbers that occur once, and reduced ones."""

import copy

STATISTICS = "n mean std median p1 p99 max max_element fp16_share non_finite near_constant".split()
LAYER = (
    "hidden_norm hidden_norm_median update_norm relative_update cosine_adjacent cosine_layer0 "
    "update_angle_degrees rotation_degrees rotation_predicted_degrees"
).split()


def statistics(*values):
    return dict(zip(STATISTICS, values, strict=True))


def modality(*values):
    return dict(zip(LAYER, values, strict=True))


def layer(index, visual, text, a1, a2, adds=False):
    return {
        "layer": index,
        "adds_visual_features": adds,
        "visual": modality(*visual),
        "text": modality(*text),
        "a1": dict(zip(("ratio", "interval", "verdict"), a1, strict=True)),
        "a2": dict(zip(("difference_degrees", "interval", "verdict"), a2, strict=True)),
    }


FULL = {
    "schema_version": 1,
    "versions": {"llava_norm_align": "0.1.0", "transformers": "5.24.0", "torch": "2.13.0", "python": "3.11.7"},
    "command": "llava-norm-align diagnose llava-hf/llava-1.5-7b-hf --probe",
    "model": {
        "name": "llava-hf/llava-1.5-7b-hf",
        "model_type": "llava",
        "class": "LlavaForConditionalGeneration",
        "dtype": "float16",
        "quantization": None,
        "device": "cuda:0",
        "attention_implementation": "sdpa",
        "decoder_layers": 4,
        "hidden_size": 4096,
        "parameters": 7063427072,
        "weights_sha256": "0123456789abcdef" * 4,
        "projector": "multi_modal_projector",
        "revision": None,
    },
    "prompt": "What is in the picture?",
    "images": {"count": 12, "source": "photos", "names": [f"photo-{index}.jpg" for index in range(12)]},
    "missing": ["No newline token was found: its norms are not shown."],
    "norms": {
        "encoder_features": statistics(6912, 30.11, 17.02, 26.4, 14.2, 88.8, 131.5, 61.25, 0.000935, 0, 0),
        "projector_output": statistics(6912, 41.07, 44.3, 27.9, 9.31, 212.6, 467.9, 118.5, 0.00181, 0, 0),
        "text_table": {
            **statistics(32064, 1.031, 0.203, 1.02, 0.0011, 1.48, 1.93, 0.39, 0.000006, 0, 3),
            "mean_of_used_rows": 1.0432,
        },
        "text_embedding_output": statistics(72, 1.072, 0.111, 1.06, 0.81, 1.31, 1.36, 0.21, 0.0000032, 0, 0),
        "text": statistics(72, 1.073, 0.112, 1.063, 0.811, 1.313, 1.363, 0.213, 0.0000033, 0, 0),
        "visual": statistics(6912, 41.08, 44.4, 28.1, 9.32, 212.7, 468.2, 119.5, 0.00182, 2, 5),
        "template": statistics(120, 1.153, 0.4, 1.13, 0.74, 1.62, 1.64, 0.36, 0.0000055, 0, 0),
        "system": statistics(360, 1.094, 0.14, 1.09, 0.72, 1.44, 1.51, 0.26, 0.000004, 0, 0),
        "bos": statistics(12, 0.171, 0.0, 0.171, 0.171, 0.171, 0.171, 0.02, 0.0000003, 0, 0),
        "newline": None,
        "padding": None,
    },
    "ratio": {"mean": 38.29, "interval": [36.1, 40.6], "median": 26.43},
    "histograms": {
        "visual": {"edges": [8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0], "counts": [900, 3100, 1900, 700, 270, 40]},
        "text": {"edges": [0.5, 0.70710678, 1.0, 1.41421356], "counts": [1, 22, 49]},
    },
    "layers": [
        layer(
            0,
            (41.08, 28.1, 5.13, 0.183, 0.9931, 0.9932, 84.2, 6.71, 7.02),
            (1.073, 1.063, 4.97, 4.632, 0.1723, 0.1724, 88.1, 80.1, 77.7),
            (1.032, [0.99, 1.08], "holds"),
            (-3.9, [-4.6, -3.1], "holds"),
        ),
        layer(
            1,
            (42.5, 29.3, 3.21, 0.113, 0.9962, 0.9871, 83.4, 4.81, 5.23),
            (5.17, 5.02, 6.24, 1.207, 0.5313, 0.0871, 93.3, 57.9, 55.1),
            (0.514, [0.49, 0.55], "fails"),
            (-9.9, [-11.2, -8.6], "fails"),
            adds=True,
        ),
        layer(
            2,
            (43.7, 30.6, 4.39, 0.144, 0.9943, 0.9752, 80.6, 6.02, 6.13),
            (8.36, 8.21, 5.76, 0.689, 0.7521, 0.0642, 96.1, 41.2, 40.4),
            (0.762, [0.69, 0.83], "undecided"),
            (-15.5, [-17.3, -13.1], "fails"),
        ),
        layer(
            3,
            (46.9, 33.4, 17.4, 0.521, 0.9012, 0.8473, 75.3, 25.7, 24.9),
            (10.52, 10.33, 36.2, 3.441, 0.3834, 0.0213, 79.5, 67.5, 69.9),
            (0.481, [0.44, 0.53], "fails"),
            (-4.2, [-6.3, -2.2], "undecided"),
        ),
    ],
    "verdicts": {
        "images": 12,
        "least_images": 8,
        "a1": {"holds": 1, "fails": 2, "undecided": 1, "none": 0},
        "a2": {"holds": 1, "fails": 2, "undecided": 1, "none": 0},
    },
    "controls": {
        "blank_image": {
            "images": 8,
            "norms": {
                "visual": statistics(4608, 33.33, 20.2, 28.7, 11.1, 99.1, 201.5, 58.3, 0.00089, 0, 0),
                "text": statistics(48, 1.074, 0.112, 1.063, 0.811, 1.313, 1.363, 0.213, 0.0000033, 0, 0),
            },
            "layers": [
                {
                    "layer": 0,
                    "adds_visual_features": False,
                    "visual": modality(33.33, 28.7, 4.9, 0.17, 0.9911, 0.9912, 85.1, 7.77, 7.9),
                    "text": modality(1.074, 1.063, 4.98, 4.64, 0.1719, 0.172, 88.2, 80.3, 77.8),
                }
            ],
        },
        "text_only": {
            "prompts": 1,
            "norms": {"text": statistics(6, 1.075, 0.113, 1.064, 0.82, 1.3, 1.36, 0.213, 0.0000033, 0, 0)},
            "layers": [{"layer": 0, "text": modality(1.075, 1.064, 5.01, 4.66, 0.1688, 0.1689, 88.4, 81.3, 77.9)}],
        },
    },
    "attention": {
        "images": 8,
        "from": "last prompt token",
        "image_share": [0.521, 0.113, 0.0807, 0.0344],
        "image_tokens_share": 0.9241,
        "map": {
            "image": "photo-0.jpg",
            "rows": 2,
            "columns": 3,
            "tile": False,
            "values": [[0.01, 0.02, 0.03], [0.04, 0.05, 0.0373]],
        },
    },
    "probe": {
        "images": 8,
        "matching_factor": 0.02612,
        "factors": [
            {"factor": 1.0, "visual_norm": 41.08, "kl_nats": 0.0, "interval": None, "top1_agreement": 1.0},
            {"factor": 0.5, "visual_norm": 20.54, "kl_nats": 0.713, "interval": [0.41, 1.22], "top1_agreement": 0.75},
            {
                "factor": 0.02612,
                "visual_norm": 1.073,
                "kl_nats": 7.94,
                "interval": [5.3, 9.9],
                "top1_agreement": 0.125,
            },
        ],
    },
    "published": {
        "source": "arXiv 2512.08374, table 2",
        "model": "LLaVA-v1.5",
        "before_projector": [28.71, 16.87],
        "after_projector": [39.96, 45.58],
        "text": 1.08,
        "ratio": 37,
        "note": "which size of the model, which images and which prompts the paper used is not known",
    },
}


def full():
    """A fresh copy of the full result."""
    return copy.deepcopy(FULL)


def few_images():
    """Under 8 images: no intervals, no verdict."""
    result = full()
    result["images"] |= {"count": 3, "names": ["a.png", "b.png", "c.png"]}
    result["ratio"]["interval"] = None
    for row in result["layers"]:
        for verdict in (row["a1"], row["a2"]):
            verdict |= {"interval": None, "verdict": "none"}
    none = {"holds": 0, "fails": 0, "undecided": 0, "none": 4}
    result["verdicts"] = {"images": 3, "least_images": 8, "a1": none, "a2": none}
    return result


def nulls():
    """All that may be null is."""
    result = full()
    result["model"] |= dict.fromkeys(("dtype", "device", "attention_implementation", "parameters", "weights_sha256"))
    result["model"]["projector"] = None
    result["norms"] = dict.fromkeys(result["norms"])
    result["ratio"] = dict.fromkeys(result["ratio"])
    result["histograms"] = dict.fromkeys(result["histograms"])
    for row in result["layers"]:
        row["visual"] = dict.fromkeys(row["visual"])
        row["a1"] |= {"ratio": None, "interval": None, "verdict": "none"}
        row["a2"] |= {"difference_degrees": None, "interval": None, "verdict": "none"}
    none = {"holds": 0, "fails": 0, "undecided": 0, "none": 4}
    result["verdicts"] |= {"a1": none, "a2": none}
    result["controls"] = dict.fromkeys(result["controls"])
    return result | dict.fromkeys(("attention", "probe", "published"))


def no_visual():
    """A modality that is not there at all, and blocks that are null as a whole."""
    result = full()
    del result["norms"]["visual"]
    result["histograms"].pop("visual")
    for row in result["layers"]:
        row["visual"] = None
    result["attention"]["map"] = None
    return result | dict.fromkeys(("ratio", "controls", "probe", "published"))


def first_part():
    """What is known when the first table is printed."""
    return {key: full()[key] for key in ("model", "norms", "ratio", "published", "missing")}


def with_layers(number):
    """The full result of a model with `number` decoder layers."""
    result = full()
    result["model"]["decoder_layers"] = number
    result["layers"] = [copy.deepcopy(FULL["layers"][index % 4]) | {"layer": index} for index in range(number)]
    result["attention"]["image_share"] = [0.5 / (index + 1) for index in range(number)]
    return result


REDUCED = {"few images": few_images, "nulls": nulls, "no visual": no_visual}


def row(text, start):
    """The cells of the table row that starts with `start`."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line[len(start) :].split()


def paths(content, above=()):
    """The keys to everything in a JSON-like value; of lists, to the first and the last entry."""
    items = content.items() if isinstance(content, dict) else []
    if isinstance(content, list) and content:
        items = {0: content[0], len(content) - 1: content[-1]}.items()
    for key, value in items:
        yield (*above, key)
        yield from paths(value, (*above, key))


def changed(path, value):
    """The full result with `value` at `path`."""
    result = full()
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return result
