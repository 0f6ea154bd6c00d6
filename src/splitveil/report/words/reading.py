"""What each number means: terms and their definitions."""

READING = {
    "term.mse": ("MSE", "MSE"),
    "meaning.mse": (
        "Mean squared error between original and reconstruction, pixels in [0, 1]. Higher is more "
        "private.",
        "原图与重建图之间的均方误差，像素取值 [0, 1]。越高越能保护隐私。",
    ),
    "term.strongest": ("Strongest", "最强攻击"),
    "meaning.strongest": (
        "For each metric the attack with the best mean: what an attacker gets who must pick one "
        "attack. The headline number.",
        "每项指标上平均成绩最好的攻击：攻击者只能选一种攻击时的所得。这是首要数字。",
    ),
    "term.worst-case": ("Worst case", "最坏情况"),
    "meaning.worst-case": (
        "For each image the best of all attacks, then the mean: a bound for an attacker who always "
        "knows which attack to pick. Never above the strongest in MSE.",
        "每张图像取所有攻击中最好的一个，再求平均：对应总能选对攻击的攻击者。其 MSE "
        "不会高于最强攻击。",
    ),
    "term.ceiling": ("Ceiling", "上限"),
    "meaning.ceiling": (
        "MSE of the mean image of the true class: what the answer alone gives away. No model that "
        "answers correctly can be expected to stand above it.",
        "真实类别平均图像的 MSE：仅答案本身就会泄露的程度。能正确回答的模型不应指望高于它。",
    ),
    "term.leakage": ("Leakage", "泄露"),
    "meaning.leakage": (
        "1 − MSE / ceiling, of the strongest attack. 0 %: nothing beyond the label. 100 %: a "
        "perfect "
        "copy. It is not clipped, so noise can carry it slightly below zero.",
        "最强攻击的 1 − MSE / 上限。0 %：除标签外毫无泄露；100 %：完全复制。数值不作截断，"
        "噪声可能使其略低于零。",
    ),
    "term.psnr": ("PSNR", "PSNR"),
    "meaning.psnr": (
        "−10 log₁₀ of the mean MSE (pooled), in decibels. Lower is more private.",
        "平均 MSE 的 −10 log₁₀（合并计算），单位分贝。越低越能保护隐私。",
    ),
    "term.ssim": ("SSIM", "SSIM"),
    "meaning.ssim": (
        "Structural similarity to the original. Lower SSIM is more private. Its strongest attack "
        "may be another one than for MSE.",
        "与原图的结构相似度。SSIM 越低越能保护隐私。其最强攻击可能与 MSE 的不同。",
    ),
    "term.rate": ("Rate", "信息率"),
    "meaning.rate": (
        "Gaussian estimate, in nats, of what the sent data tells about the image beyond its class; "
        "0 is nothing. Not defined without channel noise (–), and not a certificate.",
        "所发数据在类别之外透露的图像信息量的高斯估计，单位奈特；0 表示没有。"
        "信道无噪声时无定义（–），"
        "且不是证书。",
    ),
    "term.macs": ("Client MACs", "客户端 MAC"),
    "meaning.macs": (
        "Multiply-adds of the client for one image; wire floats are the numbers it sends.",
        "客户端处理一张图像的乘加次数；传输数值个数是它发送的数字个数。",
    ),
    "term.sample-size": ("Effective sample size", "有效样本量"),
    "meaning.sample-size": (
        "Share of a class's samples that carry the penalty's weight. Near 0 the penalty looks at "
        "few samples only.",
        "一个类别中真正承担惩罚权重的样本比例。接近 0 时惩罚项只看到少数样本。",
    ),
    "term.certificate": ("Certificate", "证书"),
    "meaning.certificate": (
        "An upper bound, in nats, on what anybody can learn about the image from the sent data, or "
        "the reason why none holds. Capacity: any images. Gallery: the scored images. Population: "
        "images like them, at 95 % confidence. Vacuous: it excludes nothing.",
        "任何人能从所发数据中获知的图像信息量的上界（奈特），或无法给出上界的原因。容量证书：任意图像；"
        "图库证书：评分图像；总体证书：同分布图像，置信度 95 %。无约束力：该上界不排除任何情况。",
    ),
    "term.flag": ("Flag", "警示"),
    "meaning.flag": (
        "A sign that a number should not be believed as it stands. No flag means that nothing was "
        "seen, not that the defence is good.",
        "表明某个数字不宜照单全收的迹象。没有警示只说明未观察到问题，不代表防御有效。",
    ),
}
TERMS = tuple(key.removeprefix("term.") for key in READING if key.startswith("term."))
