"""Natural language inference with decomposable attention, softmax or structured."""
