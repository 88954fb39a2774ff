"""The summary of a conversion in words."""

from typing import Any


def describe(summary: dict[str, Any]) -> str:
    """What was done, measured and verified; the last line says what to do next."""
    lines = [f"Note: {note}" for note in summary["notes"]]
    lines += _target_lines(summary)
    if summary.get("dry_run"):
        lines += [
            f"Would {file['how']}: {file['from']} -> {file['file']}, {file['bytes']:,} bytes"
            for file in summary["weights"]
        ]
        lines.append(f"Files: {', '.join(summary['files'])}")
    else:
        lines += _verified_lines(summary)
    return "\n".join([*lines, conclusion(summary)])


def conclusion(summary: dict[str, Any]) -> str:
    """The sentence that a conversion ends with."""
    if summary.get("dry_run"):
        return f"Nothing was written to {summary['target']} (--dry-run)."
    if summary["norm"]["norm_align_type"] == "none":
        return "A control: it computes what the source computes."
    advice = "Train this model before use"
    if summary["calibration"].get("projector", {}).get("norm"):
        advice = f"Projector and norm are those of {summary['calibration']['projector']['file']}"
    if summary["report"] is None:
        return f"{advice}: its agreement with the source was not measured (--report does)."
    agreement = 100 * summary["report"]["top1_agreement"]
    return f"{advice}: top-1 agreement with the source is {agreement:.1f} %"


def _target_lines(summary: dict[str, Any]) -> list[str]:
    calibration = summary["calibration"]
    table = calibration["table"]
    lines = [
        f"Text table: {table['rows_used']:,} rows of mean norm {table['mean'] or 0:.4f}; "
        f"{table['rows_left_out']:,} rows of zeros or added rows left out",
    ]
    if summary["norm"]["norm_align_target"] is not None:
        lines.append(f"Target norm T: {calibration['target_norm']:.4f} ({calibration['target_from']})")
    if "norm_align_scale" in summary["norm"]:
        place = "in the projector's last layer (--fold): a stock LLaVA" if summary["folded"] else "in config.json"
        lines.append(f"Factor: {summary['norm']['norm_align_scale']:.4g}, {place}")
    return lines


def _verified_lines(summary: dict[str, Any]) -> list[str]:
    verified, compared, seconds = (summary[key] for key in ("verification", "report", "seconds"))
    if verified["replaced"]:
        file = summary["calibration"]["projector"]["file"]
        what = f"tensors are byte for byte the source's, {verified['replaced']} those of {file}"
    elif any(file["how"] == "rewrite" for file in summary["weights"]):
        what = "tensors were rewritten and read back"
    else:
        what = "tensors are byte for byte the source's"
    lines = [f"Verified: {verified['untouched']:,} {what}, and the model lacks none"]
    if verified["linked"]:
        lines.append(f"Linked weight files: {verified['linked']}, the source's own; a change in one is one in both")
    if compared:
        before, after = (compared["layer0_norms"][model] for model in ("source", "target"))
        lines += [
            f"Norms at layer 0 on {len(compared['images'])} images: visual {before['visual']:.2f} -> "
            f"{after['visual']:.2f}, text {after['text']:.2f}",
            f"Text-only logits: bit-equal to the source's on {compared['text_prompts']} prompts",
            f"With an image: KL {compared['kl_nats']:.3g} nats from the source, {compared['image_prompts']} prompts",
        ]
        lines += [
            f"Started at the {name} norm, {start['target_norm']:.2f}: KL {start['kl_nats']:.3g} nats, "
            f"top-1 agreement {100 * start['top1_agreement']:.1f} %, "
            f"{start['same_answers']} of {compared['image_prompts']} answers kept"
            for name, start in compared["starts"].items()
        ]
    imports = f" (imports: {seconds['imports']:.1f} s of CPU)" if "imports" in seconds else ""
    return [*lines, f"Written: {summary['target']} in {seconds['total']:.1f} s{imports}"]
