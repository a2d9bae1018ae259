"""The float32 laboratory: a model of transformers whose attention reads its cache through a codec. Extra `torch`."""
