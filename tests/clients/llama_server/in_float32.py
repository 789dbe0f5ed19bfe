"""Writes a GGUF file once more with all weights in float32.

python in_float32.py FILE OUT
"""

import sys

import gguf

reader = gguf.GGUFReader(sys.argv[1])
writer = gguf.GGUFWriter(sys.argv[2], reader.fields["general.architecture"].contents())
for name, field in reader.fields.items():
    if name != "general.architecture" and not name.startswith("GGUF."):
        element = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
for tensor in reader.tensors:
    writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
