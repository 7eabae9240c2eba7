"""Public data sets by name: a local folder first, else a checked download."""

from dataclasses import dataclass, replace
from pathlib import Path

from bft_ref.recsys.data.readers import READERS, guess_format
from bft_ref.recsys.data.sequences import Sequences
from bft_ref.training import files

_S3REC = (
    "https://raw.githubusercontent.com/RUCAIBox/CIKM2020-S3Rec/"
    "2a81540ae18615d88ef88227b0c066e5b74781e5/data/"
)
_LETTER = (
    "https://raw.githubusercontent.com/HonghuiBao2000/LETTER/"
    "8d0154e28de37dbb6e24871c508ad8ddb1921cda/data/"
)
_MOCO4SREC = (
    "https://raw.githubusercontent.com/KlaineWei/MoCo4SRec/"
    "27cb274ec4cc249d6b6b4e06ce13230c1211c306/data/"
)
_MACREC = (
    "https://raw.githubusercontent.com/zhangfw123/MACRec/"
    "7a48e7429a8806e2290a1fc6ac5661c1ff934b51/data/"
)
_RECBOLE = (
    "https://files.pythonhosted.org/packages/ab/fe/"
    "7d606cb7cd2b166a36b100cb9435d21014ceee16c192d972deb0976967a8/"
    "recbole-1.2.1-py3-none-any.whl"
)


@dataclass(frozen=True)
class Dataset(files.PublicFile):
    """Where a data set lies, its checksum, and how to read it.

    ``length`` is the usual number of last items a model sees; ``core`` > 0
    keeps the k-core of a file that is not one yet.
    """

    format: str
    source: str
    length: int = 20
    core: int = 0


_AMAZON14 = "Amazon reviews 2014, 5-core (He & McAuley 2016), as in S3-Rec"
DATASETS: dict[str, Dataset] = {
    "beauty": Dataset(
        "Beauty.txt",
        _S3REC + "Beauty.txt",
        "226cce9c3105299ca0db9615d7d3fb32b3175e90da43100ae352599f0f0107b8",
        "s3rec",
        _AMAZON14,
    ),
    "sports": Dataset(
        "Sports_and_Outdoors.txt",
        _S3REC + "Sports_and_Outdoors.txt",
        "2a095e0648872beb9982408958290f5d655db5be2911c3756b5446de9f0b8de2",
        "s3rec",
        _AMAZON14,
    ),
    "toys": Dataset(
        "Toys_and_Games.txt",
        _S3REC + "Toys_and_Games.txt",
        "176c680c688d497598c4a89a03b402c0fe78d795e5db335c2e78dd5f2d778a3f",
        "s3rec",
        _AMAZON14,
    ),
    "instruments": Dataset(
        "Instruments.inter.json",
        _LETTER + "Instruments/Instruments.inter.json",
        "0a11d47791d90483005da93c36d826679e20e4592d1d2b86518d5f56f218e743",
        "letter",
        "Amazon reviews 2018, Musical Instruments 5-core, as in LC-Rec",
    ),
    "video-games": Dataset(
        "Video_Games.txt",
        _MOCO4SREC + "Video_Games.txt",
        "929cd5d06b806927bcdc4374140b3840f07209ebababd5960e5d411ba7aa44f8",
        "s3rec",
        "Amazon reviews 2014, Video Games 5-core, in S3-Rec's format",
    ),
    "arts": Dataset(
        "Arts.inter.json",
        _MACREC + "Arts/Arts.inter.json",
        "b7a22a19b424cc71f21425557b710c01da03327cd1b946937a66d718526727ef",
        "letter",
        "Amazon reviews 2018, Arts, Crafts and Sewing, 5-core",
    ),
    "lastfm": Dataset(
        "LastFM.txt",
        _S3REC + "LastFM.txt",
        "9ded486adb5b0fe9dc761950afa0a9a05e93ff018992e0c52bf11afec529f802",
        "s3rec",
        "HetRec 2011 LastFM 2k, as in S3-Rec",
        length=50,
    ),
    "ml-100k": Dataset(
        "ml-100k.inter",
        _RECBOLE,
        "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
        "recbole",
        "GroupLens MovieLens 100k (no redistribution), as shipped by RecBole",
        length=100,
        core=5,
        archive=(
            "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
        ),
        member="recbole/dataset_example/ml-100k/ml-100k.inter",
    ),
}


def fetch(name: str, folder: str | Path | None = None) -> Path:
    """The checked local path of a public data set, downloaded if need be.

    Looks where :func:`bft_ref.training.files.fetch` does.
    Raises: ValueError for an unknown name, and as that function.
    """
    if name not in DATASETS:
        raise ValueError(
            f"name: expected one of {', '.join(DATASETS)}, got {name!r}"
        )
    return files.fetch(name, DATASETS[name], folder)


def load(
    data: str | Path,
    *,
    folder: str | Path | None = None,
    format: str | None = None,
    **options,
) -> Sequences:
    """Read a public data set by name, or a file by path.

    ``format`` is one of READERS, by default told from the file name;
    ``options`` go to the reader. Errors: those of :func:`fetch` and of the
    reader; FileNotFoundError for a path that does not exist.
    """
    if str(data) in DATASETS:
        name = str(data)
        known = DATASETS[name]
        path, reader = fetch(name, folder), known.format
        if format not in (None, known.format):
            raise ValueError(
                f"format: expected {known.format!r} or none for {name}, got "
                f"{format!r}"
            )
        if known.core:
            options.setdefault("core", known.core)
    else:
        path, name = Path(data), Path(data).stem
        if not path.is_file():
            raise FileNotFoundError(
                f"data: expected a file or one of {', '.join(DATASETS)}, got "
                f"{str(data)!r}"
            )
        reader = format or guess_format(path)
    if reader not in READERS:
        raise ValueError(
            f"format: expected one of {', '.join(READERS)}, got {reader!r}"
        )
    return replace(READERS[reader](path, **options), name=name)
