from dataclasses import replace

import torch.nn.functional as F

from fedproto.algorithms import masked_mean, supervised, travelling
from fedproto.algorithms.fedavg import fedavg
from fedproto.config.options import NonNegativeFloat, PositiveFloat
from fedproto.core.types import Algorithm, State, Step, Task, Tree, everything


def moon(*, mu: NonNegativeFloat = 1.0, temperature: PositiveFloat = 0.5) -> Algorithm:
    """FedAvg with embeddings near the global model's and far from the client's last ones.

    Li et al. 2021, Eq. 3 and 5. With z, z_g and z_p the embeddings of a sample by the model that
    is trained, the global model, and the client's model after its previous round, and with sim
    the cosine:

    min L_S + μ · mean over the batch of
    −log(e^(sim(z, z_g)/τ) / (e^(sim(z, z_g)/τ) + e^(sim(z, z_p)/τ))).

    In a client's first round the previous model is the initial one. The embedding is what the
    model's head is given; the authors' networks end in a projection of two layers before the
    head, which a model of one's own may have, too. They tune μ for each data set.
    """

    def client_init(params: Tree, task: Task) -> State:
        return {"previous": travelling(params, everything)}

    def client_update(step: Step) -> State:
        return {"previous": travelling(step.params, everything)}

    def loss(step: Step) -> Tree:
        global_features, _ = step.forward(step.received)
        previous_features, _ = step.forward(step.state["previous"])
        to_global = F.cosine_similarity(step.features, global_features, dim=-1)
        to_previous = F.cosine_similarity(step.features, previous_features, dim=-1)
        contrast = F.softplus((to_previous - to_global) / temperature)
        return supervised(step) | {"regulariser": mu * masked_mean(contrast, step.batch.mask)}

    return replace(
        fedavg(), name="moon", loss=loss, client_init=client_init, client_update=client_update
    )
