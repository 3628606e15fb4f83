"""Other people's loggers (TensorBoard, W&B, Trackio, MLflow) as readers of run.jsonl, each in a process of its own."""
