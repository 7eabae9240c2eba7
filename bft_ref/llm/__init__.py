"""Language models that filter: a Llama of transformers with precision.

Needs the extra ``llm``: transformers, safetensors, peft and more.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from bft_ref.llm.calibration import calibrate
from bft_ref.llm.config import DEFAULT, BFTLlamaConfig
from bft_ref.llm.layer import BFTLlamaDecoderLayer
from bft_ref.llm.model import BFTLlamaForCausalLM, BFTLlamaModel, patch
from bft_ref.llm.tracing import trace

__all__ = [
    "DEFAULT",
    "BFTLlamaConfig",
    "BFTLlamaDecoderLayer",
    "BFTLlamaForCausalLM",
    "BFTLlamaModel",
    "calibrate",
    "patch",
    "trace",
]

AutoConfig.register(BFTLlamaConfig.model_type, BFTLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(
    BFTLlamaConfig, BFTLlamaForCausalLM, exist_ok=True
)
