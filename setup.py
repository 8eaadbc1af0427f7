"""Package metadata; the version lives in odsgd_kvstore/_version.py."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def read_version():
    """Return the version as text, without importing the package."""
    text = (ROOT / "odsgd_kvstore" / "_version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


def read_readme():
    """Return README.md, or nothing where it was not packed."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


setup(
    name="odsgd-kvstore",
    version=read_version(),
    description="One-step Delay SGD for Apache MXNet: the KVStore type dist_odsgd",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=["odsgd_kvstore", "odsgd_kvstore.launch"],
    package_data={"odsgd_kvstore.launch": ["docs/*.md"]},
    python_requires=">=3.8,<3.13",
    install_requires=[
        "click>=8.0",
        # odsgd_kvstore.testing is public and sends functions to processes.
        "cloudpickle>=2.0",
        # Prints manifests for Kubernetes.
        "PyYAML>=5.4",
        # MXNet 1.9.1 uses numpy.bool, which is gone from NumPy 1.24; where only
        # later ones exist, the package sets it before it imports MXNet.
        'numpy<1.24; python_version < "3.12"',
        'numpy>=1.26,<2; python_version >= "3.12"',
        # MXNet 1.9.1 imports distutils, which is gone from Python 3.12.
        'setuptools; python_version >= "3.12"',
    ],
    extras_require={
        # An extra: CUDA builds have other names and must not be overwritten.
        "cpu": ["mxnet==1.9.1"],
        "gluoncv": ["gluoncv==0.10.5.post0", "opencv-python>=4.5,<4.12"],
        "demo": ["scikit-learn"],
        # The benchmarks' plots, and Student's distribution.
        "benchmarks": ["matplotlib>=3.7", "scikit-learn", "scipy"],
        # xdist runs test files side by side: most of their time is waiting for jobs.
        # kubernetes-validate holds Kubernetes' published schemas.
        "test": ["kubernetes-validate", "pytest", "pytest-xdist", "scikit-learn"],
    },
    entry_points={
        "console_scripts": ["odsgd-launch = odsgd_kvstore.launch.cli:main"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
