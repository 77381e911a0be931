"""The crash benchmark: runs whose attention fails or does not, and what the rules say of them.

python -m benchmarks.detection run      trains what is missing in runs/detection
python -m benchmarks.detection table    writes docs/detection.md and docs/detection-runs.md from them
python -m benchmarks.detection.outside  models that the benchmark does not have (outside.py; docs/rules.md)

It takes scikit-learn for the digits and transformers for the recipes named qwen3; recipes that cannot run are named.
"""
