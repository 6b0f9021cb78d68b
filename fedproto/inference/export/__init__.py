"""A trained client as a folder of its own, which needs neither the run nor its data.

manifest.json            what the client takes and gives, and the SHA-256 of the other files
model.safetensors        its parameters and buffers, by name
prototypes.safetensors   the federation's prototypes, if its algorithm has any, as in a run folder
teacher.safetensors      the run's closed-form teacher, if it has one, as in a run folder
calibration.safetensors  the novelty of held-out rows, for "none of these", if there were any
encoding.json            how rows of a table, or texts, become numbers, if it was trained on such
model.onnx               x, as the data set stores it -> features, logits and, if there are
                         prototypes, distances, and if there is a teacher, its log-probabilities;
                         the latter alone if no model was trained

The folder names no files of the machine that wrote it: neither the data set's folder nor the
weights that training began with.
"""
