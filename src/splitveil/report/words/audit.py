"""Words for what a record holds: access, remarks, certificates, leaks beyond pixels."""

AUDIT = {
    "access.none": ("none", "无"),
    "access.label": ("label", "标签"),
    "access.black-box": ("black-box", "黑盒"),
    "access.white-box": ("white-box", "白盒"),
    "access.repeats": ("repeats", "多次发送"),
    "remark.draws": ("{count} draws", "{count} 次发送"),
    "remark.images": ("{count} images", "{count} 张图像"),
    "remark.beside": ("{count} images, {attack} {mse}", "{count} 张图像，{attack} {mse}"),
    "flags.none": ("none", "无"),
    "certificate.capacity": ("capacity", "容量证书"),
    "certificate.gallery": ("gallery", "图库证书"),
    "certificate.population": ("population", "总体证书"),
    "certificate.refused": ("refused", "未出具"),
    "certificate.vacuous": ("{value}, vacuous", "{value}，无约束力"),
    "caption.audit": (
        "Flags are signs that a number should not be believed as it stands. Certificates bound "
        "what anybody can learn, in nats; lower says more. Refused: a condition does not hold. "
        "–: not asked for.",
        "警示表明某个数字不宜照单全收。证书给出任何人所能获知信息量的上界（奈特），越低越有力。"
        "未出具：条件不满足。–：未要求。",
    ),
    "leaks.row": ("row", "运行"),
    "leaks.re-id-wire": ("re-id by z̃", "凭 z̃ 重识别"),
    "leaks.re-id-picture": ("re-id by picture", "凭重建图重识别"),
    "leaks.member-outputs": ("membership, outputs", "成员推断（输出）"),
    "leaks.member-wire": ("membership, z̃", "成员推断（z̃）"),
    "leaks.attribute": ("attribute beyond answer", "答案之外的属性"),
    "leaks.gallery": ("rate of the gallery", "图库信息率"),
    "leaks.certified": ("certified", "证书上界"),
    "leaks.doubles": ("doubles at", "翻倍次数"),
    "leaks.caption": (
        "Re-identification: share of scored images found at once among all, from z̃ itself "
        "and from the strongest attack's reconstructions. Membership: AUC of the strongest score, "
        "chance .5. Attribute: the largest share of images whose attribute z̃ tells and the answer "
        "does not. Certified: nats about an image given its class, at 95 % confidence; refused "
        "without noise. Doubles at: sendings of one image until its gallery's bound is twice as "
        "large.",
        "重识别：一次就从全部图像中找出评分图像的比例，分别凭 z̃ 本身和最强攻击的重建图。成员推断："
        "最强得分的 AUC，随机水平为 .5。属性：z̃ 能说明而答案不能说明其属性的图像的最大比例。"
        "证书上界："
        "已知类别时关于一张图像的奈特数，置信度 95 %；无噪声时不出具。翻倍次数："
        "同一图像发送多少次后，"
        "图库上界增至两倍。",
    ),
}
