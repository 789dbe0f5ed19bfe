"""From safetensors files to parameters."""
